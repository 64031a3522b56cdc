"""Budget of records: a token bucket that bounds what a member records in Dagster.

The budget belongs to the group. Each member has the share of the partitions that it owns, so the
members need no agreement. A record takes a token. Without a token, it waits and includes the
commits that follow. The interval of the records therefore grows with the number of active
partitions. Observations and results of checks do not wait: their tokens are owed, and paid with at
most half of the rate, which leaves the other half to the commits.

A commit never waits for the budget. The records of earlier owners do not grow, so each crash of a
member whose records wait adds one to the note beside the offset. Before the note is full, its
records are issued without tokens: a crash loop costs about one record per crash and partition.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from dagster_rebalance.core.partitions.state_machine import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.model.commands import RecordCommit
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.owned import OwnedPartition

_CAPACITY_S = 10.0
_LEAST_CAPACITY = 5.0
"""A member with a small share still shows a few commits at once."""


class RecordBudget:
    """The tokens of one member.

    Args:
        per_minute: The records of the group in a minute; infinite for no limit.
        now: The current time.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self._group_rate = per_minute / 60
        self._rate = self._group_rate
        self._at = now
        self._tokens = self._capacity
        self._owed = 0.0

    @property
    def _capacity(self) -> float:
        return max(_LEAST_CAPACITY, self._rate * _CAPACITY_S)

    def set_share(self, share: float, now: float) -> None:
        """Set the part of the group's budget that is this member's, above 0 and up to 1."""
        if self._rate != self._group_rate * share:
            self._refill(now)
            self._rate = self._group_rate * share
            self._tokens = min(self._tokens, self._capacity)

    def take(self, records: int, now: float) -> bool:
        """Take a token for each record, or none; return whether there were enough.

        More records than fit into the bucket need a full one, and leave a debt.
        """
        self._refill(now)
        if self._tokens < min(records, self._capacity):
            return False
        self._tokens -= records
        return True

    def owe(self, records: int, now: float) -> None:
        """Let later tokens pay for records that do not wait; at most a full bucket is owed."""
        self._refill(now)
        self._owed = min(self._capacity, self._owed + records)

    def next_at(self, records: int, now: float) -> float:
        """Return when `take` will succeed."""
        self._refill(now)
        missing = min(records, self._capacity) - self._tokens
        return now if missing <= 0 else now + (missing + min(missing, self._owed)) / self._rate

    def _refill(self, now: float) -> None:
        passed_s = max(0.0, now - self._at)
        self._at = now
        if passed_s:  # an infinite rate times 0 is not a number
            new = passed_s * self._rate
            paid = min(self._owed, new / 2)
            self._owed -= paid
            self._tokens = min(self._capacity, self._tokens + new - paid)


class DueRecords:
    """The due records of one member; the one that has waited longest comes first.

    Records that a release or a commit could wait for, dead letters and repeated commands take no
    token.

    Attributes:
        group_partitions: The number of partitions in the topics of the group; 0 if unknown.
    """

    def __init__(
        self, settings: EngineSettings, partitions: AssignedPartitions, budget: RecordBudget
    ) -> None:
        self.group_partitions = 0
        self._settings = settings
        self._partitions = partitions
        self._budget = budget
        self._queue: list[tuple[float, int, TopicPartition]] = []
        self._queued: set[tuple[int, TopicPartition]] = set()

    def issue(self, due: Iterable[OwnedPartition], now: float) -> tuple[RecordCommit, ...]:
        """Return the records to issue, after decisions about the given partitions are due."""
        issued: list[RecordCommit] = []
        for owned in due:
            records = self._due(owned, now)
            if records and _is_exempt(owned, records):
                issued += self._issued(owned, records, now)
            elif records and (owned.epoch, owned.partition) not in self._queued:
                self._queued.add((owned.epoch, owned.partition))
                since = owned.unrecorded.waiting_since
                heapq.heappush(self._queue, (since, owned.epoch, owned.partition))
        if own := len(self._partitions):
            self._budget.set_share(own / max(own, self.group_partitions), now)
        while self._queue:
            _, epoch, partition = self._queue[0]
            queued = self._partitions.get(partition)
            records = self._waiting(queued, epoch, now)
            if records and not self._budget.take(records, now):
                break
            heapq.heappop(self._queue)
            self._queued.discard((epoch, partition))
            if queued is not None and records:
                issued += self._issued(queued, records, now)
        return tuple(issued)

    def next_due(self, now: float) -> float:
        """Return when the first record that waits for tokens can be issued."""
        if not self._queue:
            return float("inf")
        _, epoch, partition = self._queue[0]
        records = self._waiting(self._partitions.get(partition), epoch, now)
        return self._budget.next_at(records, now)

    def _waiting(self, owned: OwnedPartition | None, epoch: int, now: float) -> int:
        """How many records of a queued partition wait for tokens."""
        if owned is None or owned.epoch != epoch or owned.unrecorded.issued:
            return 0
        return self._due(owned, now)

    def _due(self, owned: OwnedPartition, now: float) -> int:
        at = owned.unrecorded.issued_at
        is_early = at is not None and now - at < self._settings.retry_s
        return 0 if is_early or owned.phase is Phase.RESTORING else owned.due_records(now)

    def _issued(self, owned: OwnedPartition, records: int, now: float) -> tuple[RecordCommit, ...]:
        unrecorded = owned.unrecorded.issue(records, now, self._settings.record_every_s)
        self._partitions[owned.partition] = owned._replace(unrecorded=unrecorded)
        return unrecorded.parts[:records]


def _is_exempt(owned: OwnedPartition, records: int) -> bool:
    return (
        not owned.phase.is_kept
        or owned.unrecorded.issued > 0
        or owned.unrecorded.leaves_little_room(len(owned.entries))
        or any(record.is_dead_letter for record in owned.unrecorded.parts[:records])
    )
