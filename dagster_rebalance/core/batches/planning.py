"""Batch planning: which offsets to read next, and by which run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MOST_CLAIMS = 40
"""The number of claims that fit in the 4,095 bytes of a partition's metadata with any offsets and
batch ids."""


RUNS_AT_ONCE = 4
DEFAULT_MIN_RECORDS, DEFAULT_MAX_WAIT_S = 1_000, 30.0
"""Defaults of `min_records` and `max_wait_s`."""
_STREAM_MAX_WAIT_S = 0.2
"""The default in streaming runs: a trickle is a few batches a second, not one per record."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of batches and of runs in flight.

    Attributes:
        max_records_per_range: Offsets that one range may cover.
        max_records_per_batch: Offsets that the ranges of one batch may cover together.
        max_ranges_per_run: Ranges that one run may process, at most one per partition.
        max_runs_in_flight: Runs of this member that may be requested or live at the same time.
        max_claims_per_partition: Consecutive batches of one partition that may be in flight.
        min_records: Offsets that a partition waits for before its next batch, but no longer than
            `max_wait_s` after the first of them was seen.

    Raises:
        ConfigurationError: A limit is below 1 or too high, or `min_records` has no effect.
    """

    max_records_per_range: int = 100_000
    max_records_per_batch: int = 1_000_000
    max_ranges_per_run: int = 8
    max_runs_in_flight: int = RUNS_AT_ONCE
    max_claims_per_partition: int = 1
    min_records: int = 1
    max_wait_s: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "max_records_per_range",
            "max_records_per_batch",
            "max_ranges_per_run",
            "max_runs_in_flight",
            "max_claims_per_partition",
            "min_records",
        ):
            if getattr(self, name) < 1:
                msg = f"{name}={getattr(self, name)} must be at least 1"
                raise ConfigurationError(msg)
        if self.max_claims_per_partition > MOST_CLAIMS:
            msg = (
                f"max_claims_per_partition={self.max_claims_per_partition} must be at most "
                f"{MOST_CLAIMS}: Kafka cannot store more claims"
            )
            raise ConfigurationError(msg)
        if self.min_records > 1 and self.max_wait_s <= 0:
            msg = (
                f"min_records={self.min_records} needs a max_wait_s above 0: the time that a "
                "partition may wait for these records"
            )
            raise ConfigurationError(msg)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Offsets of a partition that are not claimed yet.

    Attributes:
        start: The first unclaimed offset.
        end: The end offset.
        waiting_since: When offsets were first seen after the last batch; the earliest partition is
            planned first. Minus infinity before the first batch.
        claims: Number of batches of the partition in flight.
        seen_since: When the first offset was seen, if the last batch had no room for this offset.
    """

    partition: TopicPartition
    start: int
    end: int
    waiting_since: float
    claims: int = 0
    seen_since: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Ranges for one run."""

    batch_id: str
    ranges: tuple[OffsetRange, ...]


def plan(
    backlogs: Sequence[Backlog],
    limits: BatchLimits,
    *,
    runs_in_flight: int,
    new_batch_id: Callable[[int], str],
    now: float,
    only_full: bool = False,
) -> tuple[Batch, ...]:
    """Choose the next batches. A run is filled before the next run is opened.

    A run is full with `max_ranges_per_run` ranges, or with the records of one full range or batch:
    the fixed cost of a run pays off for a backlog, not for a few records. Partitions that still
    wait for more records fill the remaining room. The partition with the longest wait comes first,
    so no partition starves. With `only_full`, nothing is chosen without such records.
    """
    room = limits.max_runs_in_flight - runs_in_flight
    there = sorted(
        (backlog for backlog in backlogs if _may_be_read(backlog, limits)),
        key=lambda backlog: (backlog.waiting_since, backlog.start - backlog.end, backlog.partition),
    )
    ready = [backlog for backlog in there if is_ready(backlog, limits, now)]
    if room <= 0 or not ready:
        return ()
    chosen = [range_of(backlog, limits) for backlog in ready[: room * limits.max_ranges_per_run]]
    by_ranges = -(-len(chosen) // limits.max_ranges_per_run)
    full = min(limits.max_records_per_range, limits.max_records_per_batch)
    by_records = -(-sum(map(len, chosen)) // full)
    runs = min(room, len(chosen), max(by_ranges, by_records))
    waiting = (backlog for backlog in there if not is_ready(backlog, limits, now))
    chosen += _company(waiting, chosen, limits, runs=runs)
    if only_full and sum(map(len, chosen)) < full:
        return ()
    return tuple(
        Batch(new_batch_id(1), _cut(chosen[run::runs], limits.max_records_per_batch))
        for run in range(runs)
    )


def _company(
    waiting: Iterable[Backlog], chosen: Sequence[OffsetRange], limits: BatchLimits, *, runs: int
) -> list[OffsetRange]:
    """Return ranges that may still wait, but fit into the runs without displacing due records."""
    space = runs * limits.max_records_per_batch - sum(map(len, chosen))
    company: list[OffsetRange] = []
    for backlog in waiting:
        if len(chosen) + len(company) >= runs * limits.max_ranges_per_run:
            break
        range_ = range_of(backlog, limits)
        if len(range_) <= space:
            company.append(range_)
            space -= len(range_)
    return company


def range_of(backlog: Backlog, limits: BatchLimits) -> OffsetRange:
    """Return the longest range that may be claimed from a backlog."""
    until = min(backlog.end, backlog.start + limits.max_records_per_range)
    partition = backlog.partition
    return OffsetRange(partition.topic, partition.partition, backlog.start, until)


def _may_be_read(backlog: Backlog, limits: BatchLimits) -> bool:
    return backlog.end > backlog.start and backlog.claims < limits.max_claims_per_partition


def _cut(ranges: Sequence[OffsetRange], most: int) -> tuple[OffsetRange, ...]:
    """Cut the ranges of a batch to `most` offsets in total; short ranges stay whole."""
    left, cut = most, []
    shortest_first = sorted(ranges[:most], key=lambda range_: (len(range_), range_))
    for number, range_ in enumerate(shortest_first):
        share = left // (len(shortest_first) - number)
        cut.append(replace(range_, until=min(range_.until, range_.start + share)))
        left -= len(cut[-1])
    return tuple(sorted(cut))


def runs_at_once(max_runs_in_flight: int | None, *, has_local_spark: bool) -> int:
    """Return `max_runs_in_flight`, or its default.

    With a local Spark per run, runs compete for the cores and memory of one machine: each of four
    concurrent runs took 100 s, a single run 30 s.
    """
    if max_runs_in_flight is not None:
        return max_runs_in_flight
    return 1 if has_local_spark else RUNS_AT_ONCE


def wait_limits(
    min_records: int | None, max_wait_s: float | None, *, most: int, streams: bool
) -> tuple[int, float]:
    """Return `min_records` and `max_wait_s`, or their defaults, at most `most` records.

    Per-batch runs have a high fixed cost, so few records wait for more. In streaming runs they wait
    for a moment.
    """
    is_short = streams and min_records is None
    if min_records is None:
        min_records = 1 if max_wait_s == 0 else min(DEFAULT_MIN_RECORDS, most)
    if max_wait_s is None and min_records > 1:
        max_wait_s = _STREAM_MAX_WAIT_S if is_short else DEFAULT_MAX_WAIT_S
    return min_records, max_wait_s or 0.0


def is_ready(backlog: Backlog, limits: BatchLimits, now: float) -> bool:
    """Return whether a batch may take offsets from a backlog now."""
    if not _may_be_read(backlog, limits):
        return False
    size = backlog.end - backlog.start
    since = backlog.waiting_since
    if backlog.seen_since is not None:
        since = min(since, backlog.seen_since)
    return size >= limits.min_records or now - since >= limits.max_wait_s
