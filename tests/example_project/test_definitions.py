"""People copy the example project, so it must load with the settings that it names.

When a setting is missing, it must say which one.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.model.offsets import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[2] / "example_project" / "src"
SETTINGS = {
    "KAFKA_BROKERS": "127.0.0.1:1",
    "KAFKA_GROUP": "shop",
    "KAFKA_TOPIC": "orders",
    "KAFKA_GROUP_PROTOCOL": "classic",
    "SPARK_CONNECT_URL": "sc://127.0.0.1:1",
    "ORDERS_PATH": "/nowhere",
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test import the project again, because it reads its environment at import."""
    monkeypatch.syspath_prepend(SOURCE)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "example_project"]:
        del sys.modules[name]


def _load() -> dg.Definitions:
    definitions: dg.Definitions = importlib.import_module("example_project.definitions").defs()
    return definitions


def test_the_project_loads_without_a_broker_or_a_spark() -> None:
    definitions = _load()
    dg.Definitions.validate_loadable(definitions)
    assert [sensor.name for sensor in definitions.sensors or ()] == ["kafka_batches_sensor"]
    keys = {key.to_user_string() for key in definitions.resolve_all_asset_keys()}
    group = {"kafka/shop/offsets", "kafka/shop/group", "kafka/shop/lag"}
    assert keys == {"orders", "kafka_topics/orders"} | group


def test_missing_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKA_GROUP")
    with pytest.raises(Exception, match="KAFKA_GROUP, which is not set"):
        _load()


def test_the_slowest_partition_of_a_batch_decides_how_long_the_work_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    module = importlib.import_module("example_project.simulated_work")
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setenv("SIMULATED_WORK_S", "1,9.5,3")
    module.work_on(
        SimpleNamespace(
            offset_ranges=[OffsetRange("orders", 0, 0, 1), OffsetRange("orders", 5, 0, 1)]
        )
    )
    assert slept == [3.0]
