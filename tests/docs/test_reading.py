"""docs/reading.md and the asset test of docs/testing.md: the examples work."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import dagster as dg
import duckdb
import polars as pl
import pytest
from confluent_kafka import Message

from dagster_rebalance import KafkaBatch, OffsetRange
from tests.docs.blocks import ROOT, block_with, run_block

if TYPE_CHECKING:
    from pathlib import Path

PAGE = "docs/reading.md"
EXAMPLES = ROOT / "docs" / "reading"
RANGES = (OffsetRange("orders", 0, 5, 8), OffsetRange("orders", 1, 0, 10))


def pasted(block: str, folder: Path) -> dict[str, Any]:
    """The names of an example as a user pastes it, with `/data` elsewhere."""
    names: dict[str, Any] = {"__name__": "pasted"}
    run_block(PAGE, block.replace('"/data', f'"{folder}'), names)
    return names


def batch(*items: tuple[int, int, str]) -> KafkaBatch:
    """A batch of both ranges, with records as partition, offset and item."""
    messages = [
        Message(
            topic="orders",
            partition=partition,
            offset=offset,
            value=json.dumps({"id": offset, "item": item}).encode(),
        )
        for partition, offset, item in items
    ]
    return KafkaBatch.for_testing(RANGES, messages=messages)


@pytest.fixture(autouse=True)
def _brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BROKERS", "nowhere:9092")


def test_polars_example_writes_each_range_once(tmp_path: Path) -> None:
    folder = tmp_path / "orders"
    folder.mkdir()
    names = pasted((EXAMPLES / "polars_files.py").read_text(), tmp_path)
    dg.Definitions.validate_loadable(names["defs"])
    for attempt in (batch((0, 5, "pen"), (1, 3, "cup")), batch((0, 5, "pen"), (0, 7, "ink"))):
        dg.materialize([names["orders"]], resources={"kafka_batch": attempt})
    read = pl.read_parquet(folder / "*.parquet").sort("id").rows()
    assert read == [(5, "pen"), (7, "ink")]
    assert sorted(path.name for path in folder.iterdir()) == [
        "orders-0-5-8.parquet",
        "orders-1-0-10.parquet",
    ]


def test_duckdb_example_writes_each_range_once(tmp_path: Path) -> None:
    names = pasted((EXAMPLES / "duckdb_table.py").read_text(), tmp_path)
    for attempt in (batch((0, 5, "pen"), (1, 3, "cup")), batch((0, 5, "pen"), (0, 7, "ink"))):
        dg.materialize([names["orders"]], resources={"kafka_batch": attempt})
    with duckdb.connect(str(tmp_path / "shop.duckdb")) as shop:
        read = shop.execute("SELECT batch_range, body->>'item' FROM orders ORDER BY ALL").fetchall()
    assert read == [("orders-0-5-8", "ink"), ("orders-0-5-8", "pen")]


def test_example_test_of_an_asset_passes(tmp_path: Path) -> None:
    names = pasted(block_with("docs/testing.md", "python", "for_testing("), tmp_path)
    tests = [name for name in names if name.startswith("test_")]
    assert len(tests) == 2
    for name in tests:
        names[name]()
