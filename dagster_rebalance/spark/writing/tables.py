"""Ranges in tables with transactions: one commit removes the old rows of ranges and adds the new.

The rows of a range are those with its topic, partition and offsets, regardless of their writer and
of the ranges that they were written in. No record of earlier writes is kept: because one commit
does both, two writers of a range at any interleaving leave each record once. `delta` and `iceberg`
make that commit.
"""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.batches.range_progress import read_rounds
from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.spark.reading.ranges import (
    READ_ID,
    READ_RANGES,
    explained_read_errors,
    functions_of,
    written_once,
)
from dagster_rebalance.spark.writing.schemas import refuse_ambiguous_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pyspark.sql import DataFrame, DataFrameWriter

COLUMNS = ("topic", "partition", "offset")
ATTEMPTS = 10
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_NO_SUCH_FORMAT = re.compile(
    r"DATA_SOURCE_NOT_FOUND|Failed to find (the )?data source|Cannot find catalog plugin class"
    r"|CONFIGURE_SPARK_SESSION_WITH_EXTENSION_AND_CATALOG|REQUIRES_SINGLE_PART_NAMESPACE"
)


@dataclass(frozen=True, slots=True)
class TableFormat:
    """A table format.

    Attributes:
        name: Its name in messages.
        provider: Its name in Spark.
        conflict: Matches the error of a commit that another commit has prevented.
        setup: The settings that a session needs, for a message.
    """

    name: str
    provider: str
    conflict: re.Pattern[str]
    setup: str


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of some ranges.

    Attributes:
        spans: Topic, partition, first offset, and the offset after the last, of adjacent ranges.
    """

    spans: tuple[tuple[str, int, int, int], ...]

    @classmethod
    def of(cls, ranges: Iterable[OffsetRange]) -> Rows:
        """Return the rows of ranges; raise IllegalStateError if there are none or they overlap."""
        return cls(
            tuple(
                (span[0].topic, span[0].partition, span[0].start, span[-1].until)
                for spans in read_rounds(ranges)
                for span in spans
            )
        )

    def condition(self) -> str:
        """Return SQL that is true for these rows.

        Columns are quoted, because `offset` is a reserved word of ANSI SQL. The name of a topic
        needs no escaping.
        """
        return " OR ".join(
            f"(`topic` = '{topic}' AND `partition` = {partition} "
            f"AND `offset` >= {start}L AND `offset` < {until}L)"
            for topic, partition, start, until in self.spans
        )


def replace_rows(
    frame: DataFrame,
    table: str,
    ranges: Sequence[OffsetRange],
    form: TableFormat,
    *,
    create: Callable[[DataFrameWriter], None],
    write: Callable[[DataFrame, Rows], None],
) -> None:
    """Replace the rows of some ranges in a table by those of a frame.

    Args:
        frame: All rows of these ranges.
        table: The name of the table in messages.
        ranges: The ranges of the read, or some of them. Without any, the frame must be empty.
        form: The format of the table.
        create: Creates the table, partitioned by topic and partition, with a writer of no rows that
            does nothing if the table exists.
        write: Makes the one commit that replaces the rows.

    Raises:
        IllegalStateError: A column is missing; names differ only in capitals; there are rows and
            no ranges, or others than the frame was read from; or another part of the same read was
            written to the table before.
        ConfigurationError: The session cannot write such tables, or other writers committed first
            in each attempt.
        BrokerError: Kafka no longer has all of the offsets.
    """
    _check_columns(frame)
    refuse_ambiguous_names(frame.schema)
    if not ranges:
        _check_empty(frame, table)
        return
    rows = Rows.of(ranges)
    read = _read_metadata(frame)
    _check_read(rows, read)
    if "range_start" in frame.columns:
        frame = frame.withMetadata("range_start", {})  # a table would keep it in its schema
    checked = _checked(frame, rows)
    places = {f"{range_} in {table}" for range_ in ranges}
    with written_once(read.get(READ_ID), places):
        for attempt in range(1, ATTEMPTS + 1):
            try:
                create(_empty_writer(frame, form))
                with explained_read_errors():
                    write(checked, rows)
            except Exception as error:
                if form.conflict.search(str(error)) is None:
                    if _NO_SUCH_FORMAT.search(str(error)) is None:
                        raise
                    msg = f"the Spark session cannot write {table} as a table of {form.name}: "
                    raise ConfigurationError(msg + form.setup) from error
                if attempt == ATTEMPTS:
                    msg = (
                        f"{ATTEMPTS} commits to {table} in a row conflicted with those of other "
                        "writers, and nothing of them was written. Partition the table by topic "
                        "and partition, so only writers of the same Kafka partition conflict."
                    )
                    raise ConfigurationError(msg) from error
            else:
                return
            _pause(attempt)


def overwrite(
    frame: DataFrame, table: str, rows: Rows, options: Mapping[str, str] | None = None
) -> None:
    """Replace rows of a table by a frame, in one commit."""
    writer = frame.writeTo(table).options(**(options or {}))
    writer.overwrite(functions_of(frame.sparkSession).expr(rows.condition()))


def merges_schema(options: Mapping[str, str] | None) -> bool:
    """Whether the columns of a table and those of a frame may differ."""
    given = {key.lower(): value for key, value in (options or {}).items()}
    return str(given.get("mergeschema", "")).lower() == "true"


def _check_columns(frame: DataFrame) -> None:
    missing = [column for column in COLUMNS if column not in frame.columns]
    if missing:
        msg = (
            f"the table cannot be written by range: the column(s) {', '.join(missing)} are "
            "missing. Keep those of kafka_batch.dataframe(); give aggregated rows an offset of "
            "their range, for example min(offset) AS offset."
        )
        raise IllegalStateError(msg)


def _check_empty(frame: DataFrame, table: str) -> None:
    with explained_read_errors():
        is_empty = frame.isEmpty()
    if not is_empty:
        msg = (
            f"there are rows for {table}, but no ranges: give the ranges that the frame was read "
            "from. Nothing was written."
        )
        raise IllegalStateError(msg)


def _checked(frame: DataFrame, rows: Rows) -> DataFrame:
    """Return a frame whose write fails at a row outside of the ranges."""
    return frame.where(
        f"if({rows.condition()}, true, raise_error(concat('a row of ', "
        "coalesce(`topic`, 'no topic'), '-', coalesce(string(`partition`), 'no partition'), "
        "' with offset ', coalesce(string(`offset`), 'NULL'), "
        "' is in none of the ranges that are written: nothing was written')))"
    )


def _read_metadata(frame: DataFrame) -> Mapping[str, Any]:
    """Return the metadata of the read that a frame came from."""
    if "range_start" not in frame.columns:
        return {}
    metadata: Mapping[str, Any] = frame.schema["range_start"].metadata
    return metadata


def _check_read(rows: Rows, read: Mapping[str, Any]) -> None:
    """Refuse ranges outside of the read: rows that others have written would be removed."""
    if READ_RANGES not in read:
        return
    spans_of: dict[tuple[str, int], list[tuple[int, int]]] = {}
    read_rows = Rows.of(OffsetRange(**json.loads(text)) for text in read[READ_RANGES])
    for topic, partition, start, until in read_rows.spans:
        spans_of.setdefault((topic, partition), []).append((start, until))
    for topic, partition, start, until in rows.spans:
        spans = spans_of.get((topic, partition), ())
        if not any(first <= start and until <= end for first, end in spans):
            msg = (
                f"the frame was not read from {OffsetRange(topic, partition, start, until)}: the "
                "rows of the table with these offsets would be removed, and none written in their "
                "place. Give the ranges that the frame was read from. A union of several reads "
                "counts as the first of them: write each read separately, or drop the column "
                "range_start before you write the union."
            )
            raise IllegalStateError(msg)


def _empty_writer(frame: DataFrame, form: TableFormat) -> DataFrameWriter:
    """Return a writer of no rows with the frame's columns; the frame is not evaluated."""
    empty = frame.sparkSession.createDataFrame([], frame.schema)
    return empty.write.format(form.provider).mode("ignore").partitionBy("topic", "partition")


def _pause(attempt: int) -> None:
    """Wait before a further attempt, so writers do not conflict again."""
    longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
    time.sleep(random.uniform(0, longest_s))  # noqa: S311 - no secret
