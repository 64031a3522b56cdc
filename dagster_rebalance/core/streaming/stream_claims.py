"""Claims of a streaming run: the next batch of its worker, and the claims it leaves to others.

A claim with the name of a run means that this run has begun the range: the name is written right
before the work. New records and failed ranges take turns, so many bad ranges do not block new
records.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.planning import is_ready
from dagster_rebalance.core.model.commands import AbandonClaims, CancelRuns, WriteOffsets
from dagster_rebalance.core.runs.stream_batch import is_batch_of, is_claimed_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.model.commands import Command
    from dagster_rebalance.core.model.run_snapshot import BatchRequest
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.owned import OwnedPartition


class StreamClaims:
    """The claims of one streaming run. Without a worker in the settings, there are none.

    Attributes:
        is_new_next: Whether new records are claimed before the next failed range.
    """

    def __init__(self, settings: EngineSettings, new_batch_id: Callable[..., str]) -> None:
        self._settings = settings
        self._worker = settings.worker
        self._new_batch_id = new_batch_id
        self._cancelled_at = float("-inf")
        self.is_new_next = False

    def to_begin(self, requests: tuple[BatchRequest, ...]) -> tuple[BatchRequest, ...]:
        """Return the batches that the worker may begin; without a worker, all requests."""
        if not (self._worker and requests):
            return requests
        return tuple(r for r in requests if is_claimed_by(r, self._worker))

    def may_claim_again(self, partitions: Iterable[OwnedPartition]) -> bool:
        """Whether the worker is idle and no claim is being written."""
        return self._worker != "" and not any(
            self._worker in owned.live_runs
            or owned.is_claiming
            or any(entry.is_takeover_open for entry in owned.entries)
            for owned in partitions
        )

    def claim_again(
        self, request: BatchRequest | None, partitions: AssignedPartitions, now: float
    ) -> Iterable[Command]:
        """Write the worker's name into the claims of its next batch.

        Another run has claimed them, or an attempt on them has failed.
        """
        if request is None or is_claimed_by(request, self._worker):
            return
        if request.failures or request.interruptions:
            if self.is_new_next and self._has_new(partitions.busy, now):
                return
            self.is_new_next = True
        if request.unsubmitted:
            if now - self._cancelled_at >= self._settings.retry_s:
                self._cancelled_at = now
                reason = "Dagster has not submitted it, and a streaming run takes its batch over"
                yield CancelRuns((request.unsubmitted,), reason, only_unstarted=True)
            return
        ranges = [r for r in request.ranges if partitions[r.topic_partition].pending is None]
        if not ranges:
            return
        batch_id = self._new_batch_id(request.failures + 1, request.interruptions)
        writes = []
        for range_ in ranges:
            owned = partitions[range_.topic_partition]
            pending = owned.reclaim_write(range_, batch_id, now)
            partitions[owned.partition] = replace(owned, pending=pending)
            writes.append(pending.write)
        yield WriteOffsets(tuple(writes))

    def abandoned(self, partitions: Iterable[OwnedPartition]) -> Iterable[Command]:
        """Name the worker's claims on partitions that were given up."""
        claims = frozenset(
            (entry.batch_id, entry.range)
            for owned in partitions
            for entry in owned.known_entries
            if self._worker and is_batch_of(entry.batch_id, self._worker)
        )
        if claims:
            yield AbandonClaims(claims)

    def _has_new(self, partitions: Iterable[OwnedPartition], now: float) -> bool:
        backlogs = (owned.backlog for owned in partitions)
        limits = self._settings.limits
        return any(b is not None and is_ready(b, limits, now) for b in backlogs)
