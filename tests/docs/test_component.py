"""docs/component.md: its examples load, and its tables match the code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from dagster.components.testing import create_defs_folder_sandbox

from dagster_rebalance import KafkaBatchComponent
from dagster_rebalance.components.component import BatchAsset
from tests.docs.blocks import ROOT, block_with, blocks, run_block

if TYPE_CHECKING:
    from pydantic import BaseModel

PAGE = "docs/component.md"
EXAMPLES = ROOT / "docs" / "component"


def attributes_table(model: type[BaseModel]) -> str:
    """The attributes of a model as a Markdown table."""
    names: dict[str, list[str]] = {}
    for name, field in model.model_fields.items():
        shown = f"`{name}` (required)" if field.is_required() else f"`{name}`"
        names.setdefault(field.description or "", []).append(shown)
    rows = [f"| {', '.join(those)} | {description} |" for description, those in names.items()]
    return "\n".join(["| attribute | |", "|---|---|", *rows])


@pytest.mark.parametrize("model", [KafkaBatchComponent.model(), BatchAsset.model()])
def test_component_tables_are_those_of_the_code(model: type[BaseModel]) -> None:
    table = attributes_table(model)
    assert table in (ROOT / PAGE).read_text(), f"{PAGE} should have:\n{table}"


@pytest.mark.parametrize("form", ["batch", "streaming"])
def test_component_example_loads(form: str) -> None:
    complete, streaming = blocks(PAGE, "yaml")
    with create_defs_folder_sandbox() as sandbox:
        folder = sandbox.defs_folder_path / "orders"
        folder.mkdir()
        (folder / "work.py").write_text(
            block_with(PAGE, "python", "def orders(kafka_batch: KafkaBatch, spark")
        )
        (folder / "defs.yaml").write_text(complete + (streaming if form == "streaming" else ""))
        with sandbox.load_component_and_build_defs(defs_path=folder) as (_, defs):
            dg.Definitions.validate_loadable(defs)
            spec = defs.resolve_asset_graph().get(dg.AssetKey("orders"))
            assert (spec.group_name, spec.tags["environment"]) == ("sales", "development")
            (sensor,) = defs.sensors or ()
            assert sensor.name == (
                "kafka_stream_sensor" if form == "streaming" else "kafka_batches_sensor"
            )


def test_python_form_of_the_component_loads() -> None:
    with create_defs_folder_sandbox() as sandbox:
        folder = sandbox.defs_folder_path / "orders"
        folder.mkdir()
        (folder / "component.py").write_text((EXAMPLES / "component.py").read_text())
        with sandbox.build_all_defs() as defs:
            dg.Definitions.validate_loadable(defs)
            assert dg.AssetKey("orders") in defs.resolve_all_asset_keys()


def test_custom_component_gets_its_attributes_from_yaml() -> None:
    names: dict[str, Any] = {"__name__": "pasted"}
    run_block(PAGE, (EXAMPLES / "own_component.py").read_text(), names)
    kafka = {"bootstrap_servers": "kafka:9092", "group_id": "etl", "topics": ["sales"]}
    component = names["TableComponent"].from_attributes_dict(
        attributes={"table": "sales", "kafka": kafka}
    )
    assert dg.AssetKey("sales") in dg.component_defs(component=component).resolve_all_asset_keys()
