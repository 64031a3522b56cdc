"""Run index: a snapshot of runs, found by the claimed range or the partition that they cover.

A batch may have a thousand ranges, and the runs of each range are looked up.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot


class RunIndex:
    """The runs of a snapshot. The runs of a claimed range keep the order of the snapshot."""

    def __init__(self, runs: Iterable[RunSnapshot]) -> None:
        self._runs = tuple(runs)
        self._of_claims: defaultdict[tuple[str, OffsetRange], list[RunSnapshot]] = defaultdict(list)
        for run in self._runs:
            for range_ in run.ranges:
                self._of_claims[run.batch_id, range_].append(run)

    def of(self, batch_id: str, range_: OffsetRange) -> Sequence[RunSnapshot]:
        """Return the runs of a batch that list exactly this range."""
        return self._of_claims.get((batch_id, range_), ())

    def unclaimed(
        self, ahead: OffsetRange, claimed: Iterable[tuple[OffsetRange, str]]
    ) -> tuple[str, ...]:
        """Return the runs that work on any of the offsets `ahead` without a claim.

        No run may start on the offsets until these runs have ended. An operator who moves the
        committed offset erases the claims of working runs. If a run without a claim has not started
        yet, its start check refuses it.
        """
        claims = set(claimed)
        found = (
            run.run_id
            for range_, run in self._working.get(ahead.topic_partition, ())
            if range_.overlaps(ahead) and (range_, run.batch_id) not in claims
        )
        return tuple(dict.fromkeys(found))

    def other_streams(self, partition: TopicPartition, known: Collection[str]) -> tuple[str, ...]:
        """Return the streaming runs, except `known`, that may work on a partition."""
        return tuple(
            run_id
            for run_id, partitions in self._streams.items()
            if partition in partitions and run_id not in known
        )

    @cached_property
    def _working(self) -> dict[TopicPartition, list[tuple[OffsetRange, RunSnapshot]]]:
        working: dict[TopicPartition, list[tuple[OffsetRange, RunSnapshot]]] = {}
        for run in self._runs:
            for range_ in run.ranges if run.may_work else ():
                working.setdefault(range_.topic_partition, []).append((range_, run))
        return working

    @cached_property
    def _streams(self) -> dict[str, frozenset[TopicPartition]]:
        return {
            run.run_id: run.active_partitions
            for run in self._runs
            if run.may_work and run.active_partitions is not None
        }
