"""Names of columns, tables and folders that SQL would misread without quotes, in each format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance import OffsetRange
from dagster_rebalance.spark.output import write_parquet_by_range
from tests.spark.lakes import FORMATS, Table, connected, table_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

COLUMNS = ("order-id", "a.b", "é", "back`tick", "select", "source", "it's", "Größe", "1st")
"""Names that SQL parses as something else, or not at all."""
TABLES = ("source", "order-id", "select", "a.b", "back`tick", "é")


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Iceberg's tables."""
    return tmp_path_factory.mktemp("warehouse")


@pytest.fixture(scope="module")
def session(warehouse: Path) -> Iterator[SparkSession]:
    """A session that can write tables of both formats."""
    with table_server(warehouse) as server, connected(server) as session:
        yield session


def named(session: SparkSession, range_: OffsetRange, value: str) -> DataFrame:
    """Return a record per offset, which has a value in a column of each odd name."""
    rows = [
        ("orders", 0, offset, range_.start, range_.until, *(f"{value}{name}" for name in COLUMNS))
        for offset in range(range_.start, range_.until)
    ]
    columns = ["topic", "partition", "offset", "range_start", "range_until", *COLUMNS]
    frame = session.createDataFrame(rows, columns)
    partition = frame["partition"].cast("int")
    return frame.withColumn("partition", partition)


def values(session: SparkSession, table: str) -> list[tuple[object, ...]]:
    """Return the offset and the odd columns of each row, in order."""
    if not table.startswith("delta."):
        session.catalog.refreshTable(table)
    rows = session.table(table).collect()
    return sorted((row["offset"], *(row[name] for name in COLUMNS)) for row in rows)


def expected(*spans: tuple[int, int, str]) -> list[tuple[object, ...]]:
    """Return the rows that a table must have."""
    return [
        (offset, *(f"{value}{name}" for name in COLUMNS))
        for start, until, value in spans
        for offset in range(start, until)
    ]


def span(start: int, until: int) -> OffsetRange:
    """Return a range of partition 0."""
    return OffsetRange("orders", 0, start, until)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", TABLES)
def test_odd_names_work_in_writes_reruns_and_compactions(
    session: SparkSession, warehouse: Path, tmp_path: Path, format_: str, name: str
) -> None:
    """A name that SQL misreads fails the first rerun of a range, not its first write."""
    if format_ == "delta":
        table = Table(format_, tmp_path / name, f"{tmp_path}/{name}")
    else:
        quoted = f"lake.`{tmp_path.name}`.`{name.replace('`', '``')}`"
        table = Table(format_, warehouse / tmp_path.name / name, quoted)
    for start in (0, 5):
        table.write(named(session, span(start, start + 5), "a"), [span(start, start + 5)])
    table.write(named(session, span(0, 5), "b"), [span(0, 5)])
    assert values(session, table.sql_name) == expected((0, 5, "b"), (5, 10, "a"))
    table.compact(session)
    table.write(named(session, span(3, 7), "c"), [span(3, 7)])
    assert values(session, table.sql_name) == expected((0, 3, "b"), (3, 7, "c"), (7, 10, "a"))
    table.write(named(session, span(3, 7), "d").where("false"), [span(3, 7)])
    assert values(session, table.sql_name) == expected((0, 3, "b"), (7, 10, "a"))


@pytest.mark.parametrize("name", TABLES)
def test_odd_names_work_in_a_parquet_rerun(
    session: SparkSession, tmp_path: Path, name: str
) -> None:
    out = str(tmp_path / name)
    session.conf.set("spark.sql.ansi.enforceReservedKeywords", "true")
    for value in "ab":
        write_parquet_by_range(named(session, span(0, 5), value), out)
    session.conf.unset("spark.sql.ansi.enforceReservedKeywords")
    rows = session.read.parquet(out).collect()
    found = sorted((row["offset"], *(row[column] for column in COLUMNS)) for row in rows)
    assert found == expected((0, 5, "b"))
