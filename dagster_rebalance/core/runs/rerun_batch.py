"""Reruns: repeated processing of past ranges, and the batches of its runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.directives import check_lengths
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.model.printable import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

RECORDS_PER_RUN = 100_000
RUNS_AT_ONCE = 2
MOST_RUNS = 1_000
MOST_RANGES_PER_RUN = 200
_MOST_TEXT = 1_000
"""A batch is stored as a database key, which is limited to about 2,000 bytes."""
_ID = re.compile(r"r\.(?P<rerun>[A-Za-z0-9]{1,20})\.(?P<number>[0-9]{1,6})")


def rerun_of(batch_id: str) -> str:
    """Return the rerun of a batch id; empty for a batch of the group."""
    match = _ID.fullmatch(batch_id)
    return match["rerun"] if match else ""


@dataclass(frozen=True, slots=True)
class Rerun:
    """A requested rerun.

    Attributes:
        at: Seconds since 1970.
        runs_at_once: Maximum number of concurrent runs of the rerun.
        batches: Number of runs of the rerun.
        letters: The topic of the dead letters that the rerun replays; empty for other reruns.

    Raises:
        ConfigurationError: A field is missing or too long.
    """

    rerun_id: str
    by: str
    reason: str
    at: float
    runs_at_once: int = RUNS_AT_ONCE
    batches: int = 1
    letters: str = ""

    def __post_init__(self) -> None:
        for what, text in (("name", self.by), ("reason", self.reason)):
            if not text.strip():
                msg = f"give a {what} for the rerun, which other operators see on its runs"
                raise ConfigurationError(msg)
        check_lengths(self.by, self.reason)
        if self.runs_at_once < 1:
            msg = f"runs_at_once={self.runs_at_once} must be at least 1"
            raise ConfigurationError(msg)

    def __str__(self) -> str:
        kind = "replay" if self.letters else "rerun"
        return f"{kind} {self.rerun_id} by {one_line(self.by)}: {one_line(self.reason)}"


@dataclass(frozen=True, slots=True)
class RerunBatch:
    """The ranges of one run of a rerun."""

    rerun: Rerun
    number: int
    ranges: tuple[OffsetRange, ...]

    @property
    def batch_id(self) -> str:
        """The id of the batch, distinct from all batches of the group."""
        return f"r.{self.rerun.rerun_id}.{self.number}"


def batches_of(
    rerun: Rerun, ranges: Iterable[OffsetRange], *, records_per_run: int
) -> tuple[RerunBatch, ...]:
    """Split a rerun into batches of at most `records_per_run` offsets.

    A larger range has its own run.

    Raises:
        ConfigurationError: There are too many batches, or `records_per_run` is not positive.
    """
    if records_per_run < 1:
        msg = f"records_per_run={records_per_run} must be at least 1"
        raise ConfigurationError(msg)
    groups: list[list[OffsetRange]] = []
    for range_ in ranges:
        if groups and _fits(groups[-1], range_, records_per_run, len(rerun.letters)):
            groups[-1].append(range_)
        else:
            groups.append([range_])
    if len(groups) > MOST_RUNS:
        advice = (
            "replay fewer letters at once (by their keys, or --all with --containing)"
            if rerun.letters
            else "select a shorter time or fewer partitions, or let each run process more records"
        )
        msg = f"this would have {len(groups)} runs, and {MOST_RUNS} is the maximum: {advice}"
        raise ConfigurationError(msg)
    counted = replace(rerun, batches=len(groups))
    return tuple(
        RerunBatch(counted, number, tuple(group)) for number, group in enumerate(groups, 1)
    )


def _fits(group: list[OffsetRange], range_: OffsetRange, records_per_run: int, taken: int) -> bool:
    return (
        len(group) < MOST_RANGES_PER_RUN
        and sum(map(len, group)) + len(range_) <= records_per_run
        and len(packed([*group, range_])) <= _MOST_TEXT - taken
    )


def packed(ranges: Iterable[OffsetRange]) -> str:
    """Format ranges as short text: `orders:3:120+60+60 orders:4:0+80`."""
    text, last = "", None
    for range_ in ranges:
        follows = (
            last is not None
            and last.topic_partition == range_.topic_partition
            and last.until == range_.start
        )
        if not follows:
            text += f" {range_.topic}:{range_.partition}:{range_.start}"
        text += f"+{len(range_)}"
        last = range_
    return text.lstrip()


def unpacked(text: str) -> tuple[OffsetRange, ...]:
    """Parse the text that `packed` returns.

    Raises:
        ValueError: The text is invalid.
    """
    ranges = []
    for part in text.split():
        topic, partition, numbers = part.split(":")
        start, *lengths = map(int, numbers.split("+"))
        for length in lengths:
            ranges.append(OffsetRange(topic, int(partition), start, start + length))
            start += length
    return tuple(ranges)
