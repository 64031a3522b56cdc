"""Claims of a streaming run: the next batch of its worker, and abandoned claims.

A claim with the id of a run means that this run has begun the range: the id is written right before
the work. New records and failed ranges alternate, so many failing ranges do not block new records.

If the next batch is full, it is claimed while a batch is at work, and marked as early. Any other
batch is claimed once the worker is idle, because its records would only wait longer: it would begin
at the same time with fewer records. At most one batch is claimed ahead. A range begins only after
all ranges before it in its partition, so if a batch fails, the ranges behind it wait for its
retries, and the other ranges of the next batch begin.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.planning import is_ready
from dagster_rebalance.core.model.commands import AbandonClaims, CancelRuns, WriteOffsets
from dagster_rebalance.core.partitions.assigned import Role
from dagster_rebalance.core.runs.bisection import tried_as
from dagster_rebalance.core.runs.stream_batch import is_batch_of, is_claimed_by

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.batches.planning import Backlog
    from dagster_rebalance.core.model.commands import Command
    from dagster_rebalance.core.model.run_snapshot import BatchRequest
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.owned import OwnedPartition


class StreamClaims:
    """The claims of one streaming run; empty without a worker in the settings.

    Attributes:
        is_new_next: Whether new records are claimed before the next failed range.
        claims_ahead: Whether the next batch is claimed while one is at work.
    """

    def __init__(self, settings: EngineSettings, new_batch_id: Callable[..., str]) -> None:
        self._settings = settings
        self._worker = settings.worker
        self._new_batch_id = new_batch_id
        self._cancelled_at = float("-inf")
        self.is_new_next = False
        self.claims_ahead = settings.worker != "" and settings.claims_ahead

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
            or any(entry.is_reassignment_open for entry in owned.entries)
            for owned in partitions
        )

    def may_claim_ahead(
        self, in_flight: Collection[str], partitions: Iterable[OwnedPartition]
    ) -> bool:
        """Whether the worker has a batch at work, and nothing is being claimed or committed."""
        claimed = tuple(partitions)
        return (
            self.claims_ahead
            and len(in_flight) == 1
            and any(self._worker in owned.live_runs for owned in claimed)
            and not any(
                owned.is_claiming or (owned.phase.may_plan and owned.committing)
                for owned in claimed
            )
        )

    def backlogs(
        self, partitions: Iterable[OwnedPartition], *, is_ahead: bool
    ) -> Iterator[Backlog]:
        """Yield what may be claimed; ahead, also behind the ranges at work."""
        for owned in partitions:
            backlog = owned.backlog
            if backlog is None:
                continue
            follows = is_ahead and all(self._worker in e.live_runs for e in owned.entries)
            yield replace(backlog, claims=0) if follows else backlog

    def claim_again(
        self, request: BatchRequest | None, partitions: AssignedPartitions, now: float
    ) -> Iterable[Command]:
        """Write the worker's run id into the claims of its next batch.

        Needed if another run has claimed the ranges, or an attempt on them has failed.
        """
        if request is None or is_claimed_by(request, self._worker):
            return
        if request.failures or request.interruptions or request.is_part:
            if self.is_new_next and self._has_new(partitions.of(Role.MORE), now):
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
        batch_id = tried_as(
            self._new_batch_id(request.failures + 1, request.interruptions), request.batch_id
        )
        writes = []
        for range_ in ranges:
            owned = partitions[range_.topic_partition]
            pending = owned.reassign_write(range_, batch_id, now)
            partitions[owned.partition] = owned._replace(pending=pending)
            writes.append(pending.write)
        yield WriteOffsets(tuple(writes))

    def abandoned(self, partitions: Iterable[OwnedPartition]) -> Iterable[Command]:
        """Report the worker's claims on partitions that were given up."""
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
