"""Planning: which offsets are read next, and by which run.

Owns the batch limits and the choice of ranges. It never looks at a clock or a broker: end offsets
and the time are given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MOST_CLAIMS = 40
"""So many claims of one partition fit the 4,095 bytes of its metadata, however long their offsets
and batch ids are."""


RUNS_AT_ONCE = 4
COMPANY, COMPANY_WAIT_S = 1_000, 30.0
"""How many records a partition waits for, and for how long, before it gets a run of its own."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How large batches get and how many are worked on at once.

    Attributes:
        max_records_per_range: Offsets that one range may cover.
        max_records_per_batch: Offsets that the ranges of one batch may cover together.
        max_ranges_per_run: Ranges that one run may process, each of another partition.
        max_runs_in_flight: Runs of this member that may be requested or live at the same time.
        max_claims_per_partition: Batches of one partition that may be in flight, one behind the
            other.
        min_records: A partition waits until it has this many offsets to read ...
        max_wait_s: ... but no longer than this, counted from when they were first seen.

    Raises:
        ConfigurationError: A limit is below 1 or too high, or `min_records` could have no effect.
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
                f"min_records={self.min_records} needs a max_wait_s above 0: how long a partition "
                "may wait for that many records"
            )
            raise ConfigurationError(msg)


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a partition has to read.

    Attributes:
        partition: The partition.
        start: The first offset that is not claimed yet.
        end: The offset behind the last record in Kafka.
        waiting_since: Since when it waits for its turn: when offsets behind `start` were seen since
            its last batch, on the caller's clock; minus infinity for the first batch of a
            partition.
        claims: How many batches of the partition are in flight.
        seen_since: When the first of the offsets was seen, where its last batch has left some; None
            where that is `waiting_since`.
    """

    partition: TopicPartition
    start: int
    end: int
    waiting_since: float
    claims: int = 0
    seen_since: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Ranges that one run is asked to process."""

    batch_id: str
    ranges: tuple[OffsetRange, ...]


def plan(
    backlogs: Sequence[Backlog],
    limits: BatchLimits,
    *,
    runs_in_flight: int,
    new_batch_id: Callable[[int], str],
    now: float,
) -> tuple[Batch, ...]:
    """Choose the next batches; a run is filled before the next one is opened.

    A run is full with `max_ranges_per_run` ranges, or with as many records as one range, or one
    batch, may have: each run costs seconds of its own, which a backlog is worth and a trickle is
    not. What still waits for more records comes along where there is room. The partition that has
    waited longest for its turn comes first, so no partition starves.
    """
    room = limits.max_runs_in_flight - runs_in_flight
    there = sorted(
        (backlog for backlog in backlogs if _may_be_read(backlog, limits)),
        key=lambda backlog: (backlog.waiting_since, backlog.start - backlog.end, backlog.partition),
    )
    ready = [backlog for backlog in there if is_ready(backlog, limits, now)]
    if room <= 0 or not ready:
        return ()
    chosen = [_range_of(backlog, limits) for backlog in ready[: room * limits.max_ranges_per_run]]
    by_ranges = -(-len(chosen) // limits.max_ranges_per_run)
    full = min(limits.max_records_per_range, limits.max_records_per_batch)
    by_records = -(-sum(map(len, chosen)) // full)
    runs = min(room, len(chosen), max(by_ranges, by_records))
    waiting = (backlog for backlog in there if not is_ready(backlog, limits, now))
    chosen += _company(waiting, chosen, limits, runs=runs)
    return tuple(
        Batch(new_batch_id(1), _cut(chosen[run::runs], limits.max_records_per_batch))
        for run in range(runs)
    )


def _company(
    waiting: Iterable[Backlog], chosen: Sequence[OffsetRange], limits: BatchLimits, *, runs: int
) -> list[OffsetRange]:
    """What may wait, and fits into the runs beside what is due: it takes no record from that."""
    space = runs * limits.max_records_per_batch - sum(map(len, chosen))
    company: list[OffsetRange] = []
    for backlog in waiting:
        if len(chosen) + len(company) >= runs * limits.max_ranges_per_run:
            break
        range_ = _range_of(backlog, limits)
        if len(range_) <= space:
            company.append(range_)
            space -= len(range_)
    return company


def _range_of(backlog: Backlog, limits: BatchLimits) -> OffsetRange:
    until = min(backlog.end, backlog.start + limits.max_records_per_range)
    partition = backlog.partition
    return OffsetRange(partition.topic, partition.partition, backlog.start, until)


def _may_be_read(backlog: Backlog, limits: BatchLimits) -> bool:
    return backlog.end > backlog.start and backlog.claims < limits.max_claims_per_partition


def _cut(ranges: Sequence[OffsetRange], most: int) -> tuple[OffsetRange, ...]:
    """Cut the ranges of a batch to so many offsets together; the short ones stay whole."""
    left, cut = most, []
    shortest_first = sorted(ranges[:most], key=lambda range_: (len(range_), range_))
    for number, range_ in enumerate(shortest_first):
        share = left // (len(shortest_first) - number)
        cut.append(replace(range_, until=min(range_.until, range_.start + share)))
        left -= len(cut[-1])
    return tuple(sorted(cut))


def runs_at_once(max_runs_in_flight: int | None, *, has_local_spark: bool) -> int:
    """How many runs work at the same time; None is what nobody has said.

    Local Sparks beside each other take the cores and the memory of one machine: four took a hundred
    seconds each for what one did in thirty.

    Args:
        max_runs_in_flight: As of `BatchLimits`.
        has_local_spark: Whether each run has a Spark of its own on its machine.
    """
    if max_runs_in_flight is not None:
        return max_runs_in_flight
    return 1 if has_local_spark else RUNS_AT_ONCE


def waits_for(
    min_records: int | None, max_wait_s: float | None, *, most: int, streams: bool
) -> tuple[int, float]:
    """How many records a partition waits for, and for how long; None is what nobody has said.

    A run for each batch costs seconds and many events, so a trickle waits for company. A streaming
    run takes what is there.

    Args:
        min_records: As of `BatchLimits`.
        max_wait_s: As of `BatchLimits`.
        most: How many records one range and one batch may have; more are never waited for.
        streams: Whether it is for streaming runs.
    """
    if min_records is None:
        is_taken_at_once = streams if max_wait_s is None else max_wait_s == 0
        min_records = 1 if is_taken_at_once else min(COMPANY, most)
    if max_wait_s is None:
        max_wait_s = COMPANY_WAIT_S if min_records > 1 else 0.0
    return min_records, max_wait_s


def is_ready(backlog: Backlog, limits: BatchLimits, now: float) -> bool:
    """Whether a batch may take from a backlog now."""
    if not _may_be_read(backlog, limits):
        return False
    size = backlog.end - backlog.start
    since = backlog.waiting_since
    if backlog.seen_since is not None:
        since = min(since, backlog.seen_since)
    return size >= limits.min_records or now - since >= limits.max_wait_s
