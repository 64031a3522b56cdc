"""The Griffe extension that shows the settings of builders as their parameters."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import dagster as dg
import griffe
import pytest

import dagster_rebalance
from tools.griffe_builders import Builders


@pytest.fixture(scope="module")
def package() -> griffe.Module:
    package = griffe.load(
        "dagster_rebalance", extensions=griffe.load_extensions(Builders), docstring_parser="google"
    )
    assert isinstance(package, griffe.Module)
    return package


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("orchestration.definitions", "build_kafka_batch_defs"),
        ("orchestration.definitions", "build_kafka_stream_defs"),
        ("orchestration.per_batch.batch_sensor", "build_kafka_batch_sensor"),
    ],
)
def test_builder_in_the_reference_has_its_settings_with_types_and_descriptions(
    package: griffe.Module, module: str, name: str
) -> None:
    function = package[f"{module}.{name}"]
    called = inspect.signature(getattr(dagster_rebalance, name))
    assert {one.name: one.default is None for one in function.parameters} == {
        one.name: one.default is inspect.Parameter.empty for one in called.parameters.values()
    }
    assert called.return_annotation in {dg.Definitions, dg.SensorDefinition}
    hints = get_type_hints(getattr(dagster_rebalance, name))
    assert "minimum_interval_seconds: Seconds between ticks of the sensor" in (
        inspect.getdoc(getattr(dagster_rebalance, name)) or ""
    )
    assert hints.keys() == called.parameters.keys() | {"return"}
    assert hints["lag_within_s"] == called.parameters["lag_within_s"].annotation == float | None
    assert str(function.parameters["lag_within_s"].annotation) == "float | None"
    (arguments,) = (
        section for section in function.docstring.parsed if section.kind.value == "parameters"
    )
    shown = {one.name: one.description for one in arguments.value}
    assert shown.keys() == called.parameters.keys()
    assert (
        shown["minimum_interval_seconds"]
        == "Seconds between ticks of the sensor. Values below 5 have no effect."
    )
