"""Ranges in tables: their rows, and commits that conflict."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from dagster_rebalance import ConfigurationError, IllegalStateError, OffsetRange
from dagster_rebalance.outputs import rows
from dagster_rebalance.outputs.rows import Rows
from dagster_rebalance.spark import delta_and_iceberg
from dagster_rebalance.spark.delta_and_iceberg import (
    DELTA,
    ICEBERG,
    TableFormat,
    replace_rows,
    write_delta,
    write_iceberg,
)
from dagster_rebalance.spark.ranges import READ_ID, _read_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANGES = (OffsetRange("orders", 0, 5, 8), OffsetRange("orders", 1, 0, 10))
FORM = TableFormat("Sand", "sand", re.compile("OVERTAKEN"), "it needs a bucket.")


class Frame:
    """The parts of a DataFrame that are used before a write."""

    def __init__(
        self, *columns: str, read_id: str | None = None, read: Sequence[OffsetRange] | None = None
    ) -> None:
        self.columns = list(columns)
        about: dict[str, object] = {} if read is None else _read_metadata(read)
        if read_id is not None:
            about[READ_ID] = read_id
        self.schema = StructType(
            [
                StructField(name, StringType(), metadata=about)
                for name in dict.fromkeys((*columns, "range_start"))
            ]
        )

    def where(self, _condition: str) -> Frame:
        return self

    def withMetadata(self, _column: str, _about: object) -> Frame:  # noqa: N802 - Spark's name
        return self


@pytest.fixture(autouse=True)
def _no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_and_iceberg, "_empty_writer", lambda _frame, _form: None)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The attempts after which a writer waits."""
    after: list[int] = []
    monkeypatch.setattr(rows, "pause", after.append)
    return after


def replace(
    write: Callable[[], None],
    read_id: str | None = None,
    table: str = "shop.orders",
    read: Sequence[OffsetRange] | None = None,
) -> None:
    frame: Any = Frame("topic", "partition", "offset", "range_start", read_id=read_id, read=read)
    replace_rows(
        frame, table, RANGES, FORM, create=lambda _writer: None, write=lambda _frame, _rows: write()
    )


def test_rows_are_identified_by_offsets() -> None:
    found = Rows.of([OffsetRange("orders", 0, 8, 9), *RANGES])
    assert found.spans == (("orders", 0, 5, 9), ("orders", 1, 0, 10))
    assert found.condition() == (
        "(`topic` = 'orders' AND `partition` = 0 AND `offset` >= 5L AND `offset` < 9L) OR "
        "(`topic` = 'orders' AND `partition` = 1 AND `offset` >= 0L AND `offset` < 10L)"
    )


def test_rows_without_ranges_are_refused() -> None:
    with pytest.raises(IllegalStateError, match="give at least one range"):
        Rows.of([])


def test_conflicting_commit_is_retried(pauses: list[int]) -> None:
    errors = [RuntimeError("OVERTAKEN"), RuntimeError("OVERTAKEN by another")]

    def write() -> None:
        if errors:
            raise errors.pop(0)

    replace(write)
    assert errors == []
    assert pauses == [1, 2]


def test_commit_that_always_conflicts_fails(pauses: list[int]) -> None:
    written: list[None] = []

    def write() -> None:
        written.append(None)
        msg = "OVERTAKEN"
        raise RuntimeError(msg)

    with pytest.raises(ConfigurationError, match=r"10 commits to shop\.orders in a row"):
        replace(write)
    assert len(written) == rows.ATTEMPTS == 10
    assert len(pauses) == rows.ATTEMPTS - 1


def test_other_error_is_not_retried(pauses: list[int]) -> None:

    def write() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace(write)
    assert pauses == []


@pytest.mark.parametrize(
    "error",
    [
        "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: sand.",
        "Cannot find catalog plugin class for catalog 'lake'",
        "[DELTA_CONFIGURE_SPARK_SESSION_WITH_EXTENSION_AND_CATALOG] This Delta operation requires",
    ],
    ids=["source", "catalog", "settings"],
)
def test_session_without_the_format_is_refused(error: str) -> None:

    def write() -> None:
        raise RuntimeError(error)

    with pytest.raises(
        ConfigurationError, match=r"shop\.orders as a table of Sand: it needs a buc"
    ):
        replace(write)


def test_second_part_of_a_read_is_refused_for_the_same_table() -> None:
    replace(lambda: None, read_id="one")
    with pytest.raises(IllegalStateError, match="would replace the first"):
        replace(lambda: None, read_id="one")
    replace(lambda: None, read_id="one", table="shop.returns")
    replace(lambda: None, read_id="two")

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace(fail, read_id="three")
    replace(lambda: None, read_id="three")


@pytest.mark.parametrize(
    "read",
    [
        [RANGES[1]],
        [OffsetRange("orders", 0, 5, 7), RANGES[1]],
        [OffsetRange("returns", 0, 5, 8), RANGES[1]],
    ],
    ids=["without one", "of fewer offsets", "of another topic"],
)
def test_range_outside_of_the_read_is_refused(read: list[OffsetRange]) -> None:
    written: list[None] = []
    with pytest.raises(IllegalStateError, match=r"not read from orders-0 \[5, 8\)"):
        replace(lambda: written.append(None), read=read)
    assert written == []


@pytest.mark.parametrize(
    "read",
    [
        RANGES,
        [*RANGES, OffsetRange("returns", 0, 0, 9)],
        [OffsetRange("orders", 0, 5, 6), OffsetRange("orders", 0, 6, 9), RANGES[1]],
    ],
    ids=["the same", "of more ranges", "with other bounds"],
)
def test_ranges_inside_of_the_read_are_replaced(read: Sequence[OffsetRange]) -> None:
    written: list[None] = []
    replace(lambda: written.append(None), read=read)
    assert written == [None]


@pytest.mark.parametrize("write", [write_delta, write_iceberg])
def test_frame_without_offsets_is_refused(write: Callable[..., None]) -> None:
    with pytest.raises(IllegalStateError, match=r"offset are missing.*min\(offset\) AS offset"):
        write(Frame("topic", "partition", "total"), "orders", RANGES)


@pytest.mark.parametrize(
    ("form", "error"),
    [
        (DELTA, "[DELTA_CONCURRENT_APPEND] ConcurrentAppendException: Files were added"),
        (DELTA, "[DELTA_METADATA_CHANGED] MetadataChangedException: The metadata of"),
        (DELTA, "[DELTA_PROTOCOL_CHANGED] ProtocolChangedException: The protocol version"),
        (ICEBERG, "org.apache.iceberg.exceptions.CommitFailedException: Version 3 already exists"),
        (ICEBERG, "ValidationException: Found conflicting files that can contain records"),
    ],
    ids=["append", "metadata", "protocol", "commit", "merge"],
)
def test_conflict_errors_of_the_formats_are_recognized(form: TableFormat, error: str) -> None:
    assert form.conflict.search(error)
