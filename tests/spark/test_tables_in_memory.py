"""Ranges in tables: which rows they stand for, and what becomes of a commit that was overtaken."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from dagster_rebalance import ConfigurationError, IllegalStateError, OffsetRange
from dagster_rebalance.spark.reading.ranges import READ_ID, _read_metadata
from dagster_rebalance.spark.writing import tables
from dagster_rebalance.spark.writing.delta import DELTA, write_delta
from dagster_rebalance.spark.writing.iceberg import ICEBERG, write_iceberg
from dagster_rebalance.spark.writing.tables import Rows, TableFormat, replace_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANGES = (OffsetRange("orders", 0, 5, 8), OffsetRange("orders", 1, 0, 10))
FORM = TableFormat("Sand", "sand", re.compile("OVERTAKEN"), "it needs a bucket.")


class Frame:
    """As much of a DataFrame as is asked before it is written."""

    def __init__(
        self, *columns: str, read_id: str | None = None, read: Sequence[OffsetRange] | None = None
    ) -> None:
        self.columns = list(columns)
        about: dict[str, object] = {} if read is None else _read_metadata(read)
        if read_id is not None:
            about[READ_ID] = read_id
        self.schema = StructType(
            [StructField(name, StringType(), metadata=about) for name in (*columns, "range_start")]
        )

    def where(self, _condition: str) -> Frame:
        """Itself."""
        return self

    def withMetadata(self, _column: str, _about: object) -> Frame:  # noqa: N802 - Spark's name
        """Itself."""
        return self


@pytest.fixture(autouse=True)
def _no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_empty_writer", lambda _frame, _form: None)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The attempts after which a writer waits."""
    after: list[int] = []
    monkeypatch.setattr(tables, "_pause", after.append)
    return after


def replace(
    write: Callable[[], None],
    read_id: str | None = None,
    table: str = "shop.orders",
    read: Sequence[OffsetRange] | None = None,
) -> None:
    """Replace both ranges by what a commit does."""
    frame: Any = Frame("topic", "partition", "offset", "range_start", read_id=read_id, read=read)
    replace_rows(
        frame,
        table,
        RANGES,
        FORM,
        create=lambda _writer: None,
        write=lambda _frame, _rows: write(),
    )


def test_rows_are_known_by_their_offsets() -> None:
    """Ranges that follow each other are one, so that a condition stays short."""
    rows = Rows.of([OffsetRange("orders", 0, 8, 9), *RANGES])
    assert rows.spans == (("orders", 0, 5, 9), ("orders", 1, 0, 10))
    assert rows.condition() == (
        "(`topic` = 'orders' AND `partition` = 0 AND `offset` >= 5L AND `offset` < 9L) OR "
        "(`topic` = 'orders' AND `partition` = 1 AND `offset` >= 0L AND `offset` < 10L)"
    )


def test_no_ranges_are_refused() -> None:
    """A condition that is true for no row, or for each, must not be made up."""
    with pytest.raises(IllegalStateError, match="give at least one range"):
        Rows.of([])


def test_a_commit_that_was_overtaken_is_made_again(pauses: list[int]) -> None:
    """It has written nothing, and the next one sees what the other writer has added."""
    errors = [RuntimeError("OVERTAKEN"), RuntimeError("OVERTAKEN by another")]

    def write() -> None:
        if errors:
            raise errors.pop(0)

    replace(write)
    assert errors == []
    assert pauses == [1, 2]


def test_a_writer_that_is_never_first_gives_up(pauses: list[int]) -> None:
    """Nothing hangs, and the message says what keeps writers apart."""
    written: list[None] = []

    def write() -> None:
        written.append(None)
        msg = "OVERTAKEN"
        raise RuntimeError(msg)

    with pytest.raises(ConfigurationError, match=r"10 commits to shop\.orders in a row"):
        replace(write)
    assert len(written) == tables.ATTEMPTS == 10
    assert len(pauses) == tables.ATTEMPTS - 1


def test_another_error_is_not_tried_again(pauses: list[int]) -> None:
    """It is the user's own, and reaches Dagster as it is."""

    def write() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace(write)
    assert pauses == []


@pytest.mark.parametrize(
    "said",
    [
        "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: sand.",
        "Cannot find catalog plugin class for catalog 'lake'",
        "[DELTA_CONFIGURE_SPARK_SESSION_WITH_EXTENSION_AND_CATALOG] This Delta operation requires",
    ],
    ids=["source", "catalog", "settings"],
)
def test_a_session_without_the_format_is_told_what_it_needs(said: str) -> None:
    """Spark's own message names a class."""

    def write() -> None:
        raise RuntimeError(said)

    with pytest.raises(
        ConfigurationError, match=r"shop\.orders as a table of Sand: it needs a buc"
    ):
        replace(write)


def test_a_second_part_of_a_read_is_refused_for_the_same_table_only() -> None:
    """It would replace the first one; a replay, and a failed write, are no second part."""
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
def test_a_range_that_the_frame_was_not_read_from_is_refused(read: list[OffsetRange]) -> None:
    """Topics decoded one after the other: each write would remove what the one before wrote."""
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
def test_some_of_the_ranges_of_a_read_can_be_replaced(read: Sequence[OffsetRange]) -> None:
    """What counts are the offsets: the rows of ranges with other bounds are the same."""
    written: list[None] = []
    replace(lambda: written.append(None), read=read)
    assert written == [None]


@pytest.mark.parametrize("write", [write_delta, write_iceberg])
def test_a_frame_without_offsets_is_refused(write: Callable[..., None]) -> None:
    """Before anything is read; what was aggregated is told where to get one."""
    with pytest.raises(IllegalStateError, match=r"offset are missing.*min\(offset\) AS offset"):
        write(Frame("topic", "partition", "total"), "orders", RANGES)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (DELTA, "[DELTA_CONCURRENT_APPEND] ConcurrentAppendException: Files were added"),
        (DELTA, "[DELTA_METADATA_CHANGED] MetadataChangedException: The metadata of"),
        (DELTA, "[DELTA_PROTOCOL_CHANGED] ProtocolChangedException: The protocol version"),
        (ICEBERG, "org.apache.iceberg.exceptions.CommitFailedException: Version 3 already exists"),
        (ICEBERG, "ValidationException: Found conflicting files that can contain records"),
    ],
    ids=["append", "metadata", "protocol", "commit", "merge"],
)
def test_what_the_formats_say_of_overtaken_commits_is_known(form: TableFormat, said: str) -> None:
    """As Delta Lake 4.0 and Iceberg 1.10 say it."""
    assert form.conflict.search(said)
