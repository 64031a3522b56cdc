"""Outputs of simulated runs, by range and asset.

A range is done once all of its assets are there. A second success on its offsets is a `Violation`.
Work on lost records does not count for the records that replace them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from proofs.simulation.clockwork import Violation

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot


class Outputs:
    """The outputs of the job of one group.

    Args:
        deleted: Deleted runs, whose work is unknown.
    """

    def __init__(self, deleted: Collection[str]) -> None:
        self.done: dict[TopicPartition, list[tuple[int, int, str]]] = {}
        self._deleted = deleted
        self._made: dict[tuple[OffsetRange, str], str | None] = {}
        self._in_part: set[OffsetRange] = set()
        self._makers: dict[tuple[TopicPartition, tuple[int, int, str]], frozenset[str]] = {}
        self._forgotten: list[tuple[TopicPartition, int, frozenset[str]]] = []

    def succeed(self, run: RunSnapshot, asked: Collection[str], assets: Collection[str]) -> None:
        """A run has made its requested assets, out of all assets of the job."""
        for range_ in run.ranges:
            if self._until_where_records_are(range_, run.run_id) == range_.until:
                self._made |= {(range_, asset): run.run_id for asset in asked}
            self._in_part.add(range_)
            self._complete(run, range_, asked, assets)

    def fail(
        self,
        run: RunSnapshot,
        made: Collection[str],
        spoilt: Collection[str],
        assets: Collection[str],
    ) -> None:
        """A run has made some of its assets, and has corrupted at most one other.

        It may have made all that a successful run had left out.
        """
        self._made |= {(range_, asset): run.run_id for range_ in run.ranges for asset in made}
        self._made |= {(range_, asset): None for range_ in run.ranges for asset in spoilt}
        for range_ in self._in_part.intersection(run.ranges):
            self._complete(run, range_, made, assets)

    @property
    def losses(self) -> int:
        """Return how often logs have lost records."""
        return len(self._forgotten)

    def left_of(self, range_: OffsetRange, losses: int) -> OffsetRange | None:
        """Return the remaining records of a range after later losses."""
        lost = [
            at
            for partition, at, _ in self._forgotten[losses:]
            if partition == range_.topic_partition
        ]
        until = min([range_.until, *lost])
        return replace(range_, until=until) if until > range_.start else None

    def forget(self, partition: TopicPartition, at: int, begun: Iterable[str]) -> None:
        """Drop the records from an offset on, and the work on them.

        The work of the runs in `begun` does not count either.
        """
        self._forgotten.append((partition, at, frozenset(begun)))
        self._made = {
            made: by
            for made, by in self._made.items()
            if made[0].topic_partition != partition or made[0].until <= at
        }
        self._in_part = {
            one for one in self._in_part if one.topic_partition != partition or one.until <= at
        }
        kept = [
            (entry, (entry[0], min(entry[1], at), entry[2]))
            for entry in self.done.get(partition, ())
            if entry[0] < at
        ]
        for before, after in kept:
            self._makers[partition, after] = self._makers[partition, before]
        self.done[partition] = [after for _, after in kept]

    def _complete(
        self, run: RunSnapshot, range_: OffsetRange, made: Collection[str], assets: Collection[str]
    ) -> None:
        """Return whether known runs have made all assets of a range."""
        makers = [
            self._made.get((range_, asset), run.run_id if asset in made else None)
            for asset in assets
        ]
        known = frozenset(
            maker for maker in makers if maker is not None and maker not in self._deleted
        )
        until = self._until_where_records_are(range_, run.run_id)
        if known.issuperset(makers) and until > range_.start:
            self._add(replace(range_, until=until), run.run_id, known)

    def _until_where_records_are(self, range_: OffsetRange, run_id: str) -> int:
        ends = [
            at
            for partition, at, begun in self._forgotten
            if partition == range_.topic_partition and run_id in begun
        ]
        return min([range_.until, *ends])

    def _add(self, range_: OffsetRange, run_id: str, makers: frozenset[str]) -> None:
        # The work of a run that an operator has deleted is not known any more: all is done again,
        # and its output is replaced.
        done = self.done.setdefault(range_.topic_partition, [])
        for entry in [
            (start, until, other)
            for start, until, other in done
            if start < range_.until and range_.start < until
        ]:
            if not self._makers[range_.topic_partition, entry] & set(self._deleted):
                msg = f"{range_} was materialized by {entry[2]} and by {run_id}"
                raise Violation(msg)
            done.remove(entry)
        done.append((range_.start, range_.until, run_id))
        self._makers[range_.topic_partition, done[-1]] = makers
