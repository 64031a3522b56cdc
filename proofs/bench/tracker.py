"""`tracker`: time and memory of `OffsetTracker`, beside the minimum work per record.

The marks are shuffled over all records in flight, the worst case of workers.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.offset_tracker import OffsetTracker
from proofs.bench.entries import Entry, Goal, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PARTITIONS = [TopicPartition("orders", number) for number in range(64)]
_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class _Polled:
    at: TopicPartition
    number: int

    def topic(self) -> str:
        return self.at.topic

    def partition(self) -> int:
        return self.at.partition

    def offset(self) -> int:
        return self.number

    def error(self) -> None:
        return None


def measure(*, runs: int, marks: int, step: Callable[[str], None]) -> list[Entry]:
    """Measure time and memory, with a tenth of the records in flight at a time."""
    in_flight = max(marks // _ROUNDS, len(_PARTITIONS))
    samples = []
    for run in range(runs):
        step(f"tracker, run {run + 1} of {runs}")
        samples.append(_time(shuffled(in_flight, seed=run), ours_first=bool(run % 2)))
    step("tracker, memory")
    peaks = _peaks(shuffled(in_flight, seed=0))
    return [
        Entry(
            "tracker",
            "done() against a bare dict update",
            "time",
            f"s for {marks:,} marks",
            Goal("<=", 3),
            samples,
        ),
        Entry(
            "tracker",
            f"memory, {_ROUNDS}th {marks // _ROUNDS:,} marks against the 1st",
            "peak",
            "kB",
            Goal("<=", 1.05),
            [Sample(peaks[-1] / 1000, peaks[0] / 1000, peaks[-1] / peaks[0])],
        ),
    ]


def shuffled(marks: int, *, seed: int) -> list[tuple[TopicPartition, int]]:
    """Return offsets evenly over all partitions in random order."""
    order = [(at, offset) for offset in range(marks // len(_PARTITIONS)) for at in _PARTITIONS]
    random.Random(seed).shuffle(order)  # noqa: S311 - a benchmark must be repeatable
    return order


def _time(marks: Sequence[tuple[TopicPartition, int]], *, ours_first: bool) -> Sample:
    """Measure both in turn: a slow moment of the machine slows both."""
    tracker, latest = OffsetTracker(), dict.fromkeys(_PARTITIONS, 0)
    order = sorted(marks, key=lambda mark: mark[1])
    each = len(marks) // len(_PARTITIONS)

    def ours(first: int) -> None:
        done = tracker.done
        for at, offset in marks:
            done(at, first + offset)

    def bare(first: int) -> None:
        for at, offset in marks:
            latest[at] = first + offset

    took = dict.fromkeys((ours, bare), 0.0)
    for first in range(0, _ROUNDS * each, each):
        tracker.track(_Polled(at, first + offset) for at, offset in order)
        for work in (ours, bare) if ours_first else (bare, ours):
            began_at = time.perf_counter()
            work(first)
            took[work] += time.perf_counter() - began_at
        tracker.note_committed(tracker.to_commit())
    return Sample(took[ours], took[bare], took[ours] / took[bare])


def _peaks(marks: Sequence[tuple[TopicPartition, int]]) -> list[int]:
    """Return the peak memory of each round of one tracker, which accumulates kept memory."""
    tracker, peaks = OffsetTracker(), []
    order = sorted(marks, key=lambda mark: mark[1])
    each = len(marks) // len(_PARTITIONS)
    tracemalloc.start()
    try:
        for first in range(0, _ROUNDS * each, each):
            tracemalloc.reset_peak()
            tracker.track(_Polled(at, first + offset) for at, offset in order)
            for at, offset in marks:
                tracker.done(at, first + offset)
            tracker.note_committed(tracker.to_commit())
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    return peaks
