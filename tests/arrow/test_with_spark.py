"""Spark and Arrow write the same outputs: each replaces the ranges of the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from dagster_rebalance.arrow import output as arrow
from dagster_rebalance.spark import output as spark
from tests.arrow.given import records, span, with_time
from tests.spark.lakes import connected, table_server
from tests.spark.readers import LIBRARIES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

RANGES = (span(0, 5), span(5, 10), span(0, 5, topic="Orders", partition=3))


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("warehouse")


@pytest.fixture(scope="module")
def session(warehouse: Path) -> Iterator[SparkSession]:
    """A session that can write tables of both formats."""
    with table_server(warehouse) as server, connected(server) as session:
        yield session


def of_spark(session: SparkSession, table: Any) -> DataFrame:  # noqa: ANN401
    """Return the same records in Spark."""
    columns = "topic string, partition int, offset bigint, value string, range_start bigint, "
    rows = [tuple(row.values()) for row in table.to_pylist()]
    return session.createDataFrame(rows, f"{columns} range_until bigint, at timestamp")


@pytest.mark.parametrize("first", ["spark", "arrow"])
def test_parquet_ranges_of_the_other_engine_are_replaced(
    session: SparkSession, tmp_path: Path, first: str
) -> None:
    out = str(tmp_path / "out")

    def by_spark(ranges: Any, value: str) -> None:  # noqa: ANN401
        frame = of_spark(session, with_time(records(ranges, value)))
        spark.write_parquet_by_range(frame, out)

    def by_arrow(ranges: Any, value: str) -> None:  # noqa: ANN401
        arrow.write_parquet_by_range(with_time(records(ranges, value)), out)

    one, other = (by_spark, by_arrow) if first == "spark" else (by_arrow, by_spark)
    one(RANGES, "a")
    other([RANGES[1], RANGES[2]], "b")
    one([RANGES[2]], "c")
    wanted = sorted((topic, offset) for offset, topic, *_ in values_of_ranges())
    found = {name: sorted(read(tmp_path / "out")) for name, read in LIBRARIES.items()}
    assert found == dict.fromkeys(found, wanted)
    rows = session.read.parquet(out).selectExpr("offset", "topic", "value", "unix_micros(at)")
    assert sorted(map(tuple, rows.collect())) == values_of_ranges()


@pytest.mark.parametrize("first", ["spark", "arrow"])
def test_delta_ranges_of_the_other_engine_are_replaced(
    session: SparkSession, tmp_path: Path, first: str
) -> None:
    place = str(tmp_path / "out")

    def by_spark(ranges: Any, value: str) -> None:  # noqa: ANN401
        frame = of_spark(session, with_time(records(ranges, value)))
        spark.write_delta(frame, place, ranges)

    def by_arrow(ranges: Any, value: str) -> None:  # noqa: ANN401
        arrow.write_delta(with_time(records(ranges, value)), place, ranges)

    one, other = (by_spark, by_arrow) if first == "spark" else (by_arrow, by_spark)
    one(RANGES, "a")
    other([RANGES[1], RANGES[2]], "b")
    one([RANGES[2]], "c")
    rows = session.table(f"delta.`{place}`").selectExpr(
        "offset", "topic", "value", "unix_micros(at)"
    )
    wanted = values_of_ranges()
    assert sorted(map(tuple, rows.collect())) == wanted
    found = DeltaTable(place).to_pyarrow_table().to_pylist()
    assert (
        sorted(
            (row["offset"], row["topic"], row["value"], int(row["at"].timestamp() * 1_000_000))
            for row in found
        )
        == wanted
    )


def values_of_ranges() -> list[tuple[int, str, str, int]]:
    return sorted(
        (offset, range_.topic, value, 1_000_000 * offset)
        for range_, value in zip(RANGES, "abc", strict=True)
        for offset in range(range_.start, range_.until)
    )
