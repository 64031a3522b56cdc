"""Agenda: the partitions that the engine decides about next.

A decision about one partition follows from its state and the time. So it can only change when the
partition changes, or at one of its due times. A heap has the next due time of each partition.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.engine_settings import ROUNDING_S
from dagster_rebalance.core.engine.filter_scans import SCAN_PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.owned import OwnedPartition

_FEW = 64


class Agenda:
    """The partitions of one member that have changed, and the due times of its other partitions."""

    def __init__(self, settings: EngineSettings, partitions: AssignedPartitions) -> None:
        self._settings = settings
        self._partitions = partitions
        self._due_at: dict[TopicPartition, float] = {}
        self._heap: list[tuple[float, TopicPartition]] = []

    @property
    def next_due(self) -> float:
        """When to decide again if no partition changes."""
        self._drop_outdated()
        return self._heap[0][0] if self._heap else float("inf")

    def take(self, now: float) -> list[OwnedPartition]:
        """Return, and remove, the partitions that have changed or are due, ordered by epoch."""
        taken = self._partitions.take_changed()
        while self.next_due <= now:
            _, partition = heapq.heappop(self._heap)
            del self._due_at[partition]
            taken.add(partition)
        owned = self._partitions.by_epoch(taken)
        for partition in taken:
            self._due_at.pop(partition, None)
        for one in owned:
            times = (at for at in due_times(one, self._settings) if at > now - ROUNDING_S)
            at = min(times, default=None)
            if at is not None:
                self._due_at[one.partition] = at - ROUNDING_S
                heapq.heappush(self._heap, (at - ROUNDING_S, one.partition))
        return owned

    def _drop_outdated(self) -> None:
        """Drop the times of partitions that have changed since they were added."""
        if len(self._heap) > _FEW + 2 * len(self._due_at):
            self._heap = [(at, partition) for partition, at in self._due_at.items()]
            heapq.heapify(self._heap)
        while self._heap and self._due_at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)


def due_times(owned: OwnedPartition, settings: EngineSettings) -> Iterable[float]:
    """Yield when a decision about a partition may change without an event; ignore past times."""
    if owned.pending is not None:
        yield owned.pending.last_sent_at + settings.retry_s
        yield owned.pending.last_sent_at + settings.recheck_s
    if owned.unrecorded:
        yield owned.unrecorded.due_at
        if owned.unrecorded.issued_at is not None:
            yield owned.unrecorded.issued_at + settings.retry_s
    if owned.dead_letter is not None:
        yield owned.dead_letter.due_at
    if owned.backlog_since is not None:
        seen_since = owned.backlog_since if owned.seen_since is None else owned.seen_since
        yield min(owned.backlog_since, seen_since) + settings.limits.max_wait_s
    if owned.scan is not None:
        yield owned.scan.since + SCAN_PATIENCE_S
    for entry in owned.entries:
        yield entry.due_at
        yield entry.due_at - settings.recheck_s  # its runs are read again
