"""Ranges in tables with transactions: one commit of the table replaces what it has of them.

Owns which rows of a table a range stands for (those of its offsets, whoever wrote them, in whatever
ranges), that a frame has no other rows, how a table is made, and how often a commit is tried again
that another writer has overtaken. Keeps no record of what was written: the commit that removes the
rows of a range is the one that adds them, so two writers of a range, at any interleaving, leave it
once. How a format makes that commit is in `delta` and `iceberg`.
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
from dagster_rebalance.spark.reading.ranges import READ_ID, READ_RANGES, explained_read_errors
from dagster_rebalance.spark.reading.reads import written_once
from dagster_rebalance.spark.session.jobs import is_connect
from dagster_rebalance.spark.writing.schemas import refuse_alike_names

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
    """What differs between the formats.

    Attributes:
        name: For people.
        provider: Spark's word for it.
        overtaken: What the error of a commit says that did not happen because of another one.
        setup: What a session needs, for people.
    """

    name: str
    provider: str
    overtaken: re.Pattern[str]
    setup: str


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of some ranges.

    Attributes:
        spans: Topic, partition, first offset, and the one behind the last, of ranges without a gap
            between them.
    """

    spans: tuple[tuple[str, int, int, int], ...]

    @classmethod
    def of(cls, ranges: Iterable[OffsetRange]) -> Rows:
        """Those of a batch.

        Raises:
            IllegalStateError: There are no ranges, or they overlap.
        """
        return cls(
            tuple(
                (span[0].topic, span[0].partition, span[0].start, span[-1].until)
                for spans in read_rounds(ranges)
                for span in spans
            )
        )

    def condition(self) -> str:
        """Return SQL that is true for these rows. The name of a topic needs no escaping.

        The names of columns are quoted: `offset` is a reserved word of ANSI SQL.
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
    """Let a table have the rows of a frame, and no others, for some ranges.

    Args:
        frame: All rows of these ranges.
        table: Its name for people.
        ranges: The ranges: those of the read, or some of them. Without any, the frame has no row,
            and nothing is done.
        form: The format of the table.
        create: Gets a writer of no rows that does nothing where there is a table. It makes one that
            is partitioned by topic and partition.
        write: Makes the one commit that replaces the rows.

    Raises:
        IllegalStateError: A column is missing; names differ only in capitals; there are rows and
            no ranges, or others than the frame was read from; or another part of the same read was
            written to the table before.
        ConfigurationError: The session cannot write such tables, or other writers were faster each
            time.
        BrokerError: Kafka no longer has all of the offsets.
    """
    _check_columns(frame)
    refuse_alike_names(frame.schema)
    if not ranges:
        _check_empty(frame, table)
        return
    rows = Rows.of(ranges)
    about_read = _about_read(frame)
    _check_read(rows, about_read)
    if "range_start" in frame.columns:
        frame = frame.withMetadata("range_start", {})  # a table would keep it in its schema
    checked = _checked(frame, rows)
    places = {f"{range_} in {table}" for range_ in ranges}
    with written_once(about_read.get(READ_ID), places):
        for attempt in range(1, ATTEMPTS + 1):
            try:
                create(_writer_of_nothing(frame, form))
                with explained_read_errors():
                    write(checked, rows)
            except Exception as error:
                if form.overtaken.search(str(error)) is None:
                    explained = _explained(error, table, form)
                    if explained is None:
                        raise
                    raise explained from error
                if attempt == ATTEMPTS:
                    raise _never_first(table) from error
            else:
                return
            _pause(attempt)


def overwrite(
    frame: DataFrame, table: str, rows: Rows, options: Mapping[str, str] | None = None
) -> None:
    """Replace rows of a table by a frame, in one commit."""
    writer = frame.writeTo(table).options(**(options or {}))
    writer.overwrite(sql_column(frame, rows.condition()))


def merges_schema(options: Mapping[str, str] | None) -> bool:
    """Whether the user lets the columns of a table and those of a frame differ."""
    given = {key.lower(): value for key, value in (options or {}).items()}
    return str(given.get("mergeschema", "")).lower() == "true"


def sql_column(frame: DataFrame, text: str) -> Any:
    """An expression for the frame's kind of session: pyspark's own choice goes by the process."""
    if is_connect(frame.sparkSession):
        from pyspark.sql.connect import functions
    else:
        from pyspark.sql import functions  # type: ignore[no-redef]
    return functions.expr(text)


def _check_columns(frame: DataFrame) -> None:
    missing = [column for column in COLUMNS if column not in frame.columns]
    if missing:
        msg = (
            f"the table cannot be written by range: the column(s) {', '.join(missing)} are "
            "missing. Keep those of kafka_batch.dataframe(); what was aggregated takes an offset "
            "of its range, say min(offset) AS offset."
        )
        raise IllegalStateError(msg)


def _check_empty(frame: DataFrame, table: str) -> None:
    with explained_read_errors():
        is_empty = frame.isEmpty()
    if not is_empty:
        msg = (
            f"there are rows for {table}, and none of the ranges that they are of: give those that "
            "the frame was read from. Nothing was written."
        )
        raise IllegalStateError(msg)


def _checked(frame: DataFrame, rows: Rows) -> DataFrame:
    """The frame, whose write fails when it meets a row that is of none of the ranges."""
    return frame.where(
        f"if({rows.condition()}, true, raise_error(concat('a row of ', "
        "coalesce(`topic`, 'no topic'), '-', coalesce(string(`partition`), 'no partition'), "
        "' with offset ', coalesce(string(`offset`), 'NULL'), "
        "' is in none of the ranges that are written: nothing was written')))"
    )


def _about_read(frame: DataFrame) -> Mapping[str, Any]:
    """What the frame says of the read that it came from."""
    if "range_start" not in frame.columns:
        return {}
    about: Mapping[str, Any] = frame.schema["range_start"].metadata
    return about


def _check_read(rows: Rows, about_read: Mapping[str, Any]) -> None:
    """Refuse ranges that the read did not have: rows that others have written would go."""
    if READ_RANGES not in about_read:
        return
    read = Rows.of(OffsetRange(**json.loads(text)) for text in about_read[READ_RANGES])
    known: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for topic, partition, start, until in read.spans:
        known.setdefault((topic, partition), []).append((start, until))
    for topic, partition, start, until in rows.spans:
        spans = known.get((topic, partition), ())
        if not any(first <= start and until <= end for first, end in spans):
            msg = (
                f"the frame was not read from {OffsetRange(topic, partition, start, until)}: what "
                "the table has of these offsets would be removed, and nothing written in its "
                "place. Give the ranges that the frame was read from. A union of several reads "
                "counts as the first of them: write each read on its own, or drop the column "
                "range_start before you write the union."
            )
            raise IllegalStateError(msg)


def _writer_of_nothing(frame: DataFrame, form: TableFormat) -> DataFrameWriter:
    """Of a table with the frame's columns; the frame itself is not looked at."""
    nothing = frame.sparkSession.createDataFrame([], frame.schema)
    return nothing.write.format(form.provider).mode("ignore").partitionBy("topic", "partition")


def _explained(error: Exception, table: str, form: TableFormat) -> ConfigurationError | None:
    if _NO_SUCH_FORMAT.search(str(error)) is None:
        return None
    msg = f"the Spark session cannot write {table} as a table of {form.name}: {form.setup}"
    return ConfigurationError(msg)


def _never_first(table: str) -> ConfigurationError:
    msg = (
        f"{ATTEMPTS} commits to {table} in a row were overtaken by those of other writers. Nothing "
        "of them was written. Partition the table by topic and partition, so that only writers of "
        "the same partition of Kafka meet each other."
    )
    return ConfigurationError(msg)


def _pause(attempt: int) -> None:
    """Wait before a further attempt, so that writers do not meet each other again."""
    most_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
    time.sleep(random.uniform(0, most_s))  # noqa: S311 - no secret
