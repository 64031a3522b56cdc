"""Ranges in real tables of Delta Lake and Iceberg: no loss, no duplicates."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from dagster_rebalance import ConfigurationError, IllegalStateError, OffsetRange
from dagster_rebalance.spark.output import write_parquet_by_range
from dagster_rebalance.testing.deadline import wait_until
from tests.spark.lakes import FORMATS, Table, connected, table_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from dagster_rebalance.testing.spark_connect import SparkConnectServer

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

LIMIT_S = 300.0
_MAGIC = b"PAR1"
"""Begins and ends a complete file of Parquet."""


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("warehouse")


@pytest.fixture(scope="module")
def server(warehouse: Path) -> Iterator[SparkConnectServer]:
    with table_server(warehouse) as server:
        yield server


@pytest.fixture(scope="module")
def session(server: SparkConnectServer) -> Iterator[SparkSession]:
    """Return a Connect session: a classic one may have a JVM without the jars of tables."""
    with connected(server) as session:
        yield session


@pytest.fixture(params=FORMATS)
def table(request: pytest.FixtureRequest, warehouse: Path, tmp_path: Path) -> Table:
    """Return a table that does not exist yet."""
    return Table.of(request.param, warehouse, tmp_path)


def span(start: int, until: int, partition: int = 0) -> OffsetRange:
    return OffsetRange("orders", partition, start, until)


def records(session: SparkSession, range_: OffsetRange, value: str) -> DataFrame:
    """Return all records of a range, with a value."""
    return session.sql(
        f"SELECT 'orders' AS topic, {range_.partition} AS partition, id AS offset, "  # noqa: S608
        f"'{value}' AS value FROM range({range_.start}, {range_.until}, 1, 2)"
    )


def slowly(frame: DataFrame, offset: int, ms: int) -> DataFrame:
    """Return the same rows; the task with this offset waits before it."""
    wait = f"java_method('java.lang.Thread', 'sleep', bigint({ms}))"
    waits = f"if(offset = {offset}, {wait}, '')"
    return frame.selectExpr(
        "topic", "partition", "offset", f"left(concat(value, coalesce({waits}, '')), 1) AS value"
    )


def expected(*spans: tuple[int, int, str], partition: int = 0) -> list[tuple[int, int, str]]:
    return [
        (partition, offset, value)
        for start, until, value in spans
        for offset in range(start, until)
    ]


def test_rewritten_range_is_replaced(session: SparkSession, table: Table) -> None:

    def write(range_: OffsetRange, value: str) -> None:
        table.write(records(session, range_, value), [range_])

    write(span(0, 10), "a")
    others = [span(10, 20), span(0, 5, partition=1)]
    rows = records(session, others[0], "a").unionAll(records(session, others[1], "a"))
    table.write(rows, others)
    beside = expected((0, 5, "a"), partition=1)
    assert table.read(session) == expected((0, 20, "a")) + beside
    table.write(records(session, span(0, 10), "b").where("offset % 10 < 8"), [span(0, 10)])
    assert table.read(session) == expected((0, 8, "b"), (10, 20, "a")) + beside
    write(span(5, 15), "c")
    assert table.read(session) == expected((0, 5, "b"), (5, 15, "c"), (15, 20, "a")) + beside
    table.write(records(session, span(0, 5), "d").where("false"), [span(0, 5)])
    now = expected((5, 15, "c"), (15, 20, "a")) + beside
    assert table.read(session) == now
    with pytest.raises(PySparkException, match="orders-0 with offset 5 is in none of the ranges"):
        table.write(records(session, span(5, 6), "e"), [span(6, 7)])
    assert table.read(session) == now
    assert [path.name for path in table.folder.rglob("partition=*")], "partitioned"


def test_compacted_range_is_replaced(session: SparkSession, table: Table) -> None:
    for start in range(0, 20, 5):
        table.write(records(session, span(start, start + 5), "a"), [span(start, start + 5)])
    table.compact(session)
    others = [span(5, 10), span(20, 25)]
    rows = records(session, others[0], "b").unionAll(records(session, others[1], "b"))
    table.write(rows, others)
    assert table.read(session) == expected((0, 5, "a"), (5, 10, "b"), (10, 20, "a"), (20, 25, "b"))


def test_new_column_needs_only_merge_schema(session: SparkSession, table: Table) -> None:
    for start in (0, 5, 10):
        table.write(records(session, span(start, start + 5), "a"), [span(start, start + 5)])
    table.compact(session)
    more = records(session, span(5, 10), "b").selectExpr("*", "named_struct('a-b', 1) AS `n.x`")
    with pytest.raises(PySparkException, match=r"n.{1,3}x"):
        table.write(more, [span(5, 10)])
    for _ in range(2):
        table.write(more, [span(5, 10)], mergeSchema="true")
    assert table.read(session) == expected((0, 5, "a"), (5, 10, "b"), (10, 15, "a"))
    found = table.read(session, "coalesce(string(`n.x`.`a-b`), '-')")
    assert [value for *_, value in found] == [*5 * "-", *5 * "1", *5 * "-"]


def test_frame_without_a_column_of_the_table_is_refused(
    session: SparkSession, table: Table
) -> None:
    table.write(records(session, span(0, 5), "a"), [span(0, 5)])
    less = records(session, span(0, 5), "b").drop("value")
    with pytest.raises((PySparkException, IllegalStateError), match="value"):
        table.write(less, [span(0, 5)])
    assert table.read(session) == expected((0, 5, "a"))


def test_column_with_a_default_may_be_missing(session: SparkSession, tmp_path: Path) -> None:
    table = Table.of("delta", tmp_path, tmp_path)
    session.sql(
        f"CREATE TABLE {table.sql_name} (topic STRING, partition INT, offset BIGINT, value STRING, "
        "kind STRING DEFAULT 'new') USING delta PARTITIONED BY (topic, partition) "
        "TBLPROPERTIES ('delta.feature.allowColumnDefaults' = 'supported')"
    ).collect()
    table.write(records(session, span(0, 5), "a"), [span(0, 5)])
    assert table.read(session, "kind") == expected((0, 5, "new"))


def test_columns_that_differ_in_capitals_are_refused(session: SparkSession, table: Table) -> None:
    frame = records(session, span(0, 5), "a").selectExpr("*", "1 AS Value")
    with pytest.raises(IllegalStateError, match="'value' and 'Value'"):
        table.write(frame, [span(0, 5)])
    assert not table.folder.exists()


def test_compacted_table_that_accepts_any_schema_is_refused(
    session: SparkSession, warehouse: Path, tmp_path: Path
) -> None:
    table = Table.of("iceberg", warehouse, tmp_path)
    for start in (0, 5):
        table.write(records(session, span(start, start + 5), "a"), [span(start, start + 5)])
    table.compact(session)
    name = "write.spark.accept-any-schema"
    session.sql(f"ALTER TABLE {table.sql_name} SET TBLPROPERTIES ('{name}' = 'true')").collect()
    with pytest.raises(ConfigurationError, match=f"UNSET TBLPROPERTIES .'{name}'"):
        table.write(records(session, span(5, 10), "b"), [span(5, 10)])
    session.sql(f"ALTER TABLE {table.sql_name} UNSET TBLPROPERTIES ('{name}')").collect()
    table.write(records(session, span(5, 10), "b"), [span(5, 10)])
    assert table.read(session) == expected((0, 5, "a"), (5, 10, "b"))


def test_concurrent_writers_leave_a_range_once(server: SparkConnectServer, table: Table) -> None:
    range_ = span(0, 100)
    start = threading.Barrier(3)
    errors: list[BaseException] = []

    def work(session: SparkSession, value: str) -> None:
        start.wait(LIMIT_S)
        for round_ in range(2):
            frame = records(session, range_, value)
            late = slowly(frame, 0, 2000) if value == "a" and round_ else frame
            table.write(late, [range_])

    def work_and_record(session: SparkSession, value: str) -> None:
        try:
            work(session, value)
        except BaseException as error:  # noqa: BLE001 - compared below
            errors.append(error)

    with ExitStack() as sessions:  # one that ends shuts down threads that all of them share
        writers = [
            threading.Thread(
                target=work_and_record, args=(sessions.enter_context(connected(server)), value)
            )
            for value in "abc"
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(2 * LIMIT_S)
    assert errors == []
    with connected(server) as session:
        found = table.read(session)
    assert [offset for _, offset, _ in found] == list(range(100))
    assert len({value for *_, value in found}) == 1, "rows of two writers"


@pytest.mark.parametrize("format_", FORMATS)
def test_session_without_the_format_is_refused(
    spark_connect_server: SparkConnectServer, format_: str, tmp_path: Path
) -> None:
    table = Table.of(format_, tmp_path, tmp_path)
    with connected(spark_connect_server) as session:
        unread = records(session, span(0, 5), "a").where("isnull(raise_error('read'))")
        with pytest.raises(ConfigurationError, match=r"needs the package .*spark\.jars\.packages"):
            table.write(unread, [span(0, 5)])


def test_killed_server_leaves_no_partial_write(warehouse: Path, tmp_path: Path) -> None:
    range_ = span(0, 100)
    tables = [Table.of(format_, warehouse, tmp_path) for format_ in FORMATS]
    with table_server(warehouse) as server:
        with connected(server) as session:
            for table in tables:
                table.write(records(session, span(0, 50), "a"), [span(0, 50)])
        writers = [
            threading.Thread(target=_write_without_commit, args=(server, table), daemon=True)
            for table in tables
        ]
        for table, writer in zip(tables, writers, strict=True):
            before = table.data_files()
            writer.start()
            wait_until(
                partial(_has_a_file_beside, table, before),
                timeout_s=LIMIT_S,
                what=f"the first task to write its file of {table.name}",
            )
        server.kill()
        server.restart()
        for writer in writers:
            # A session that ends shuts down threads that all sessions of a process share.
            writer.join(LIMIT_S)
            assert not writer.is_alive()
        with connected(server) as session:
            for table in tables:
                assert table.read(session) == expected((0, 50, "a"))
                table.write(records(session, range_, "b"), [range_])
                assert table.read(session) == expected((0, 100, "b"))


def test_killed_local_spark_leaves_no_partial_write(
    session: SparkSession, warehouse: Path, tmp_path: Path
) -> None:
    tables = [Table.of(format_, warehouse, tmp_path) for format_ in FORMATS]
    for table in tables:
        table.write(records(session, span(0, 50), "a"), [span(0, 50)])
    before = {table.name: table.data_files() for table in tables}
    command = [sys.executable, "-m", "tests.spark.table_run", str(warehouse), str(tmp_path)]
    with subprocess.Popen(command, start_new_session=True) as run:
        try:
            for table in tables:
                wait_until(
                    partial(_has_a_file_beside, table, before[table.name]),
                    timeout_s=LIMIT_S,
                    what=f"the first task to write its file of {table.name}",
                )
        finally:
            os.killpg(run.pid, signal.SIGKILL)
    for table in tables:
        assert table.read(session) == expected((0, 50, "a"))
        table.write(records(session, span(0, 100), "b"), [span(0, 100)])
        assert table.read(session) == expected((0, 100, "b"))


def _write_without_commit(server: SparkConnectServer, table: Table) -> None:
    """Write with a second task that waits, so there is no commit."""
    with suppress(Exception), connected(server) as session:
        frame = slowly(records(session, span(0, 100), "b"), 50, 600_000)
        table.write(frame, [span(0, 100)], as_read=True)


def _has_a_file_beside(table: Table, known: set[Path]) -> bool:
    contents = (path.read_bytes() for path in table.data_files() - known)
    return any(len(content) > len(_MAGIC) and content.endswith(_MAGIC) for content in contents)


COLUMNS = ("order-id", "a.b", "é", "back`tick", "select", "source", "it's", "Größe", "1st")
"""Names that SQL parses as something else, or not at all."""
TABLES = ("source", "select", "order-id.é`tick")


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


def expected_of_columns(*spans: tuple[int, int, str]) -> list[tuple[object, ...]]:
    return [
        (offset, *(f"{value}{name}" for name in COLUMNS))
        for start, until, value in spans
        for offset in range(start, until)
    ]


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", TABLES)
def test_unusual_names_work_in_writes_reruns_and_compactions(
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
    assert values(session, table.sql_name) == expected_of_columns((0, 5, "b"), (5, 10, "a"))
    table.compact(session)
    table.write(named(session, span(3, 7), "c"), [span(3, 7)])
    assert values(session, table.sql_name) == expected_of_columns(
        (0, 3, "b"), (3, 7, "c"), (7, 10, "a")
    )
    table.write(named(session, span(3, 7), "d").where("false"), [span(3, 7)])
    assert values(session, table.sql_name) == expected_of_columns((0, 3, "b"), (7, 10, "a"))


@pytest.mark.parametrize("name", TABLES)
def test_unusual_names_work_in_a_parquet_rerun(
    session: SparkSession, tmp_path: Path, name: str
) -> None:
    out = str(tmp_path / name)
    session.conf.set("spark.sql.ansi.enforceReservedKeywords", "true")
    for value in "ab":
        write_parquet_by_range(named(session, span(0, 5), value), out)
    session.conf.unset("spark.sql.ansi.enforceReservedKeywords")
    rows = session.read.parquet(out).collect()
    found = sorted((row["offset"], *(row[column] for column in COLUMNS)) for row in rows)
    assert found == expected_of_columns((0, 5, "b"))
