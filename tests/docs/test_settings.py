"""docs/settings.md and docs/client-settings.md: each setting with its default and description."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance import KafkaConsumerResource, KafkaSparkResource, SchemaRegistryResource
from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.kafka.client.defaults import TABLE
from dagster_rebalance.orchestration.member import storage_worker
from dagster_rebalance.orchestration.per_batch import hosted_members
from tests.docs.blocks import ROOT

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


def settings_table(model: type[BaseModel]) -> str:
    """The settings of a resource as a Markdown table."""
    rows = [
        f"| `{name}` | {_default(field)} | {field.description} |"
        for name, field in model.model_fields.items()
    ]
    return "\n".join(["| setting | default | |", "|---|---|---|", *rows])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return f"`{value}`"
    return "none" if not value else f"{value:,}"


@pytest.mark.parametrize(
    "model", [KafkaConsumerResource, KafkaSparkResource, SchemaRegistryResource]
)
def test_settings_table_is_that_of_the_code(model: type[BaseModel]) -> None:
    table = settings_table(model)
    assert table in (ROOT / "docs/settings.md").read_text(), (
        f"docs/settings.md should have:\n{table}"
    )


def test_client_settings_table_is_that_of_the_code() -> None:
    head = "| setting | value | clients | yours wins | why |\n|---|---|---|---|---|"
    joined: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for default in TABLE:
        name, value, *rest = str(default).strip("| ").split(" | ")
        joined.setdefault(tuple(rest), []).append((name, value))
    rows = [
        f"| {' | '.join([*map(', '.join, zip(*those, strict=True)), *rest])} |"
        for rest, those in joined.items()
    ]
    table = "\n".join((head, *rows))
    assert table in (ROOT / "docs/client-settings.md").read_text(), (
        f"docs/client-settings.md should have:\n{table}"
    )


def test_fixed_times_are_those_of_the_code() -> None:
    text = " ".join((ROOT / "docs/settings.md").read_text().split())
    said = re.search(r"- Fixed times: (.*?) ##", text)
    assert said is not None
    fixed = EngineSettings()
    times = (
        fixed.plan_patience_s,
        fixed.plan_patience_s,
        fixed.recheck_s,
        hosted_members._SILENCE_S,
        hosted_members._ABANDONED_AFTER_S,
        storage_worker._SILENCE_S,
        storage_worker._HANG_TIMEOUT_S,
    )
    assert f"after {fixed.plan_patience_s:g} s without a tick nothing is claimed" in said[1]
    assert f"stopped partition is checked every {fixed.recheck_s:g} s" in said[1]
    assert re.findall(r"([0-9]+) s\b", said[1]) == [f"{seconds:g}" for seconds in times]
    for model in (KafkaConsumerResource, KafkaSparkResource):
        assert [name for name in model.model_fields if name in said[1]] == []
