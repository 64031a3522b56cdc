"""This module sends the caller's commits, and delivers the answer of each one.

It commits assigned partitions only, in the order of the calls, and loses no answer.

Owns the callbacks of asynchronous commits, and the pause marks in the metadata on their way to the
broker and back. Must never decide what is committed, and never abandon a commit: one that reaches
the broker late could overwrite the next owner's.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.model.errors import (
    BrokerError,
    PartitionLostError,
    RebalanceInProgressError,
)
from dagster_rebalance.core.model.events import PartitionsLost
from dagster_rebalance.kafka.consumer.pauses import with_mark, without_mark
from dagster_rebalance.kafka.events import CommitAnswered, CommitResult

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from collections.abc import Set as AbstractSet

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.kafka.consumer.pauses import Pauses
    from dagster_rebalance.kafka.events import MemberEvent, Offsets
    from dagster_rebalance.kafka.ports import GroupMember

logger = logging.getLogger(__name__)

CommitCallback: TypeAlias = "Callable[[Offsets, BrokerError | None], None]"
"""Called with the offsets of a commit, and with the error that `commit_sync` would have raised, or
None."""


class CallerCommits:
    """What one consumer's caller commits.

    Args:
        member: The member of the group.
        assigned: What counts as assigned; seen live.
        told: What the member has told and nobody has carried out yet; seen live.
        carried: The pause marks that commits have to carry, if they do; seen live.
    """

    def __init__(
        self,
        member: GroupMember,
        assigned: AbstractSet[TopicPartition],
        told: Collection[MemberEvent],
        carried: Pauses | None,
    ) -> None:
        self._member = member
        self._assigned = assigned
        self._told = told
        self._carried = carried
        self._waiting: dict[int, tuple[Offsets, Callable[[CommitResult], None]]] = {}
        self._events: list[MemberEvent] = []
        self._due: list[Callable[[], None]] = []
        self.stored_marks: dict[TopicPartition, bool] = {}
        """Whether Kafka has a pause mark of a partition; not in it while that is not known. Whoever
        reads and writes marks keeps it; a commit with another mark makes it unknown."""

    def commit(self, offsets: Offsets, timeout_s: float | None = None) -> CommitResult:
        """Commit in one request and wait for the outcome.

        What is not answered within `timeout_s` counts as failed, and may be stored.
        """
        kept, refused = self._sorted_out(offsets)
        if not kept:
            result = CommitResult(frozenset())
        elif timeout_s is None:
            result = self._member.commit(kept)
        else:
            result = self._commit_within(kept, timeout_s)
        return CommitResult(result.committed, {**result.failed, **refused})

    def commit_later(self, offsets: Offsets, callback: CommitCallback | None) -> None:
        """Send a commit in one request; its callback is due once it is answered."""
        kept, refused = self._sorted_out(offsets)

        def answered(result: CommitResult) -> None:
            error = worst_error(CommitResult(result.committed, {**result.failed, **refused}))
            self._due.append(lambda: (callback or _log)(offsets, error))

        # An empty one too: answers come in the order of the calls.
        self._waiting[self._member.commit_async(kept)] = (kept, answered)

    def answered(self, event: CommitAnswered) -> None:
        """A commit that was sent has an outcome."""
        # Nobody waits any more for one that was not answered within the time that its caller had.
        _, answered = self._waiting.pop(event.ticket, (None, None))
        if answered:
            answered(event.result)

    @property
    def lost(self) -> frozenset[TopicPartition]:
        """Partitions whose loss the member has told, and the caller has not heard of.

        They may be assigned again behind it.
        """
        return frozenset(
            tp
            for event in (*self._told, *self._events)
            if isinstance(event, PartitionsLost)
            for tp in event.partitions
        )

    def take_events(self) -> list[MemberEvent]:
        """What else the member told while a commit was waited for."""
        events, self._events = self._events, []
        return events

    def take_due(self) -> Iterator[Callable[[], None]]:
        """Yield the callbacks of commits that have their outcome, in the order of the outcomes.

        The next call yields the callbacks that the caller has not taken.
        """
        while self._due:
            yield self._due.pop(0)

    def finish(self, timeout_s: float) -> list[MemberEvent]:
        """Wait for outcomes, answer commits that got none, and return the member's other events."""
        if self._waiting:
            self._settle(timeout_s)
        for offsets, answered in self._waiting.values():
            answered(_unanswered(offsets))
        self._waiting.clear()
        return self.take_events()

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed, without pause marks."""
        found = self._member.committed(partitions, timeout_s)
        return {
            tp: offset and replace(offset, metadata=without_mark(offset.metadata)[0])
            for tp, offset in found.items()
        }

    def _commit_within(self, offsets: Offsets, timeout_s: float) -> CommitResult:
        # Before anything is sent: where it cannot be waited for, this refuses.
        self._member.settle(0)
        outcome: list[CommitResult] = []
        self._waiting[self._member.commit_async(offsets)] = (offsets, outcome.append)
        self._settle(timeout_s)
        return outcome[0] if outcome else _unanswered(offsets)

    def _settle(self, timeout_s: float) -> None:
        self._member.settle(timeout_s)
        for event in self._member.poll(0):
            if isinstance(event, CommitAnswered):
                self.answered(event)
            else:
                self._events.append(event)

    def _sorted_out(
        self, offsets: Offsets
    ) -> tuple[dict[TopicPartition, OffsetAndMetadata], dict[TopicPartition, BrokerError]]:
        kept: dict[TopicPartition, OffsetAndMetadata] = {}
        refused: dict[TopicPartition, BrokerError] = {}
        marked = self._carried.partitions if self._carried else frozenset()
        owned = self._member.assignment() - self.lost
        for tp, offset in offsets.items():
            if tp not in self._assigned or tp not in owned:
                message = (
                    f"commit for {tp} refused: it is not assigned any more; stop the work on it"
                )
                refused[tp] = PartitionLostError(message, partitions={tp: "not assigned"})
            else:
                kept[tp] = (
                    replace(offset, metadata=with_mark(offset.metadata)) if tp in marked else offset
                )
                # Before it is sent: it may be stored without an answer, and at any later time.
                if self.stored_marks.get(tp) is not (tp in marked):
                    self.stored_marks.pop(tp, None)
        return kept, refused


def worst_error(result: CommitResult) -> BrokerError | None:
    """Return the error that matters most to the caller; None when all were committed.

    The error names every partition that failed.
    """
    if not result.failed:
        return None
    worst = min(result.failed.values(), key=_severity)
    worst.partitions = {
        tp: reason for error in result.failed.values() for tp, reason in error.partitions.items()
    }
    return worst


def _unanswered(offsets: Offsets) -> CommitResult:
    message = (
        f"a commit of {len(offsets)} partitions was not answered in time, "
        "and may yet be stored: commit again"
    )
    return CommitResult(
        frozenset(),
        {
            tp: BrokerError(message, retriable=True, partitions={tp: "not answered in time"})
            for tp in offsets
        },
    )


def _severity(error: BrokerError) -> int:
    return (
        0
        if isinstance(error, PartitionLostError)
        else 2
        if isinstance(error, RebalanceInProgressError)
        else 1
    )


def _log(offsets: Offsets, error: BrokerError | None) -> None:
    if error is not None:
        logger.warning(
            "a commit of %d partitions that nobody waits for failed: %s", len(offsets), error
        )
