"""Rows of ranges in a table, and commits that conflict.

The rows of a range are the rows with its topic, partition and offsets, regardless of their writer
and of the ranges that they were written in.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.range_progress import read_rounds
from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.core.model.offsets import OffsetRange

COLUMNS = ("topic", "partition", "offset")
ATTEMPTS = 10
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of adjacent ranges: topic, partition, first offset, and end (exclusive)."""

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

    def condition(self, quote: str = "`", suffix: str = "L") -> str:
        """Return SQL that is true for these rows, with quoted names and a suffix of long numbers.

        Columns are quoted, because `offset` is a reserved word of ANSI SQL. The name of a topic
        needs no escaping.
        """
        topic_, partition_, offset_ = (f"{quote}{name}{quote}" for name in COLUMNS)
        return " OR ".join(
            f"({topic_} = '{topic}' AND {partition_} = {partition} "
            f"AND {offset_} >= {start}{suffix} AND {offset_} < {until}{suffix})"
            for topic, partition, start, until in self.spans
        )


def check_columns(columns: Iterable[str]) -> None:
    """Raise IllegalStateError if columns do not identify the rows of a range."""
    known = set(columns)
    missing = [column for column in COLUMNS if column not in known]
    if missing:
        msg = (
            f"the table cannot be written by range: the column(s) {', '.join(missing)} are "
            "missing. Keep those of the batch's records; give aggregated rows an offset of "
            "their range, for example min(offset) AS offset."
        )
        raise IllegalStateError(msg)


def rows_without_ranges(table: str) -> IllegalStateError:
    """Return the error for rows without ranges."""
    return IllegalStateError(
        f"there are rows for {table}, but no ranges: pass the ranges that the records were read "
        "from. Nothing was written."
    )


def until_no_conflict(
    table: str, write: Callable[[], None], is_conflict: Callable[[Exception], bool]
) -> None:
    """Write until no other commit has prevented the own one; raise after ten conflicts in a row."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            write()
        except Exception as error:
            if not is_conflict(error):
                raise
            if attempt == ATTEMPTS:
                msg = (
                    f"{ATTEMPTS} commits to {table} in a row conflicted with those of other "
                    "writers, and nothing was written. Partition the table by topic and "
                    "partition, so only writers of the same Kafka partition conflict."
                )
                raise ConfigurationError(msg) from error
        else:
            return
        pause(attempt)


def pause(attempt: int) -> None:
    """Wait before another attempt, so writers do not conflict again."""
    longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
    time.sleep(random.uniform(0, longest_s))  # noqa: S311 - no secret
