"""Outputs from Spark that are redirected: the real output is read at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from dagster_rebalance import IllegalStateError, OffsetRange, redirect_outputs
from dagster_rebalance.spark.output import write_parquet_by_range
from tests.spark.lakes import FORMATS, Table, connected, table_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("warehouse")


@pytest.fixture(scope="module")
def session(warehouse: Path) -> Iterator[SparkSession]:
    with table_server(warehouse) as server, connected(server) as session:
        yield session


@pytest.fixture
def frame(session: SparkSession) -> Callable[[OffsetRange, str], DataFrame]:
    """Return a function that returns all records of a range, with a value."""
    return lambda range_, value: session.sql(
        f"SELECT 'orders' AS topic, {range_.partition} AS partition, id AS offset, "  # noqa: S608
        f"'{value}' AS value, bigint({range_.start}) AS range_start, "
        f"bigint({range_.until}) AS range_until FROM range({range_.start}, {range_.until}, 1, 1)"
    )


FIRST, SECOND = OffsetRange("orders", 0, 0, 3), OffsetRange("orders", 0, 3, 10)


@pytest.mark.parametrize("form", FORMATS)
def test_redirected_table_is_as_it_was(
    session: SparkSession,
    warehouse: Path,
    tmp_path: Path,
    frame: Callable[[OffsetRange, str], DataFrame],
    form: str,
) -> None:
    table = Table.of(form, warehouse, tmp_path)
    table.write(frame(FIRST, "a"), [FIRST])
    with redirect_outputs(str(tmp_path / "scratch")) as scratch:
        table.write(frame(FIRST, "b"), [FIRST])
        table.write(frame(SECOND, "c"), [SECOND])
        with pytest.raises((IllegalStateError, PySparkException), match=r"(?i)value"):
            table.write(frame(FIRST, "d").drop("value"), [FIRST])
    (made,) = scratch.outputs
    assert (made.name, made.rows, len(made.shown)) == (table.name, 10, 5)
    assert {row["value"] for row in made.shown} <= {"b", "c"}
    rows = session.sql(f"SELECT offset, value FROM {table.sql_name}").collect()  # noqa: S608
    assert sorted(map(tuple, rows)) == [(offset, "a") for offset in range(3)]


def test_redirected_files_are_as_they_were(
    session: SparkSession, tmp_path: Path, frame: Callable[[OffsetRange, str], DataFrame]
) -> None:
    out = str(tmp_path / "out")
    write_parquet_by_range(frame(FIRST, "a"), out)
    with redirect_outputs(str(tmp_path / "scratch")) as scratch:
        assert write_parquet_by_range(frame(FIRST, "b"), out) == 3
        assert write_parquet_by_range(frame(SECOND, "c"), out) == 7
        assert write_parquet_by_range(frame(SECOND, "d").where("false"), f"{out}-other") == 0
        with pytest.raises(IllegalStateError, match="value"):
            write_parquet_by_range(frame(FIRST, "d").drop("value"), out)
    assert [(made.name, made.rows) for made in scratch.outputs] == [(out, 10), (f"{out}-other", 0)]
    assert {row["value"] for row in scratch.outputs[0].shown} <= {"b", "c"}
    rows = session.read.parquet(out).select("offset", "value").collect()
    assert sorted(map(tuple, rows)) == [(offset, "a") for offset in range(3)]
