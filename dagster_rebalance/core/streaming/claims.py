"""The claims of a streaming run: which its worker begins next, and which it leaves to others.

Owns that a claim with the name of a run has been begun by it: the name is written right before the
work. Owns as well whose turn it is, new records or ranges that have failed: many bad ones keep
nothing back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.planning import is_ready
from dagster_rebalance.core.model.commands import CancelRuns, LeaveClaims, WriteOffsets
from dagster_rebalance.core.runs.stream_batch import is_batch_of, is_claimed_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.core.batches.settings import EngineSettings
    from dagster_rebalance.core.model.commands import Command, OffsetWrite
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.owned import OwnedPartition
    from dagster_rebalance.core.runs.offer import Offer


class StreamClaims:
    """The claims of one streaming run; a member that is none has nothing to write again.

    Args:
        settings: They name the worker.
        new_batch_id: Names a batch, given its attempt, and its interruptions.

    Attributes:
        is_new_next: Whether new records are claimed before what has failed is begun again.
    """

    def __init__(self, settings: EngineSettings, new_batch_id: Callable[..., str]) -> None:
        self._settings = settings
        self._worker = settings.worker
        self._new_batch_id = new_batch_id
        self._cancelled_at = float("-inf")
        self.is_new_next = False

    def to_begin(self, wanted: Iterable[Offer]) -> tuple[Offer, ...]:
        """The batches that may be begun: all of a member that requests runs."""
        return tuple(o for o in wanted if not self._worker or is_claimed_by(o, self._worker))

    def may_write_again(self, partitions: Iterable[OwnedPartition]) -> bool:
        """Whether there is a worker, it has nothing at work, and no claim is being written."""
        return self._worker != "" and not any(
            self._worker in owned.live_runs
            or owned.is_claiming
            or any(entry.is_in_question for entry in owned.entries)
            for owned in partitions
        )

    def written_again(
        self, wanted: Offer | None, partitions: AssignedPartitions, now: float
    ) -> Iterable[Command]:
        """Write the worker's name into the claims that it is to work on next.

        Another run has claimed them, or an attempt on them has failed.

        Args:
            wanted: The batch whose turn it is.
            partitions: Those of the member; what is written is noted in them.
            now: The time.
        """
        if wanted is None or is_claimed_by(wanted, self._worker):
            return
        if wanted.failures or wanted.interruptions:
            if self.is_new_next and self._has_new(partitions.busy, now):
                return
            self.is_new_next = True
        if wanted.unsubmitted:
            if now - self._cancelled_at >= self._settings.retry_s:
                self._cancelled_at = now
                reason = "Dagster has not submitted it, and a streaming run takes its batch over"
                yield CancelRuns((wanted.unsubmitted,), reason, only_unstarted=True)
            return
        ranges = [r for r in wanted.ranges if partitions[r.topic_partition].pending is None]
        if ranges:
            batch_id = self._new_batch_id(wanted.failures + 1, wanted.interruptions)
            yield WriteOffsets(tuple(_claimed(partitions, r, batch_id, now) for r in ranges))

    def left_behind(self, partitions: Iterable[OwnedPartition]) -> Iterable[Command]:
        """Name the claims of the worker that others find when they own the partitions."""
        claims = frozenset(
            (entry.batch_id, entry.range)
            for owned in partitions
            for entry in owned.known_entries
            if self._worker and is_batch_of(entry.batch_id, self._worker)
        )
        if claims:
            yield LeaveClaims(claims)

    def _has_new(self, partitions: Iterable[OwnedPartition], now: float) -> bool:
        backlogs = (owned.backlog for owned in partitions)
        limits = self._settings.limits
        return any(b is not None and is_ready(b, limits, now) for b in backlogs)


def _claimed(
    partitions: AssignedPartitions, range_: OffsetRange, batch_id: str, now: float
) -> OffsetWrite:
    owned = partitions[range_.topic_partition]
    pending = owned.claim_again_write(range_, batch_id, now)
    partitions[owned.partition] = replace(owned, pending=pending)
    return pending.write
