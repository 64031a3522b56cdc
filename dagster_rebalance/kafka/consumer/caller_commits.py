"""Commits of the caller: assigned partitions only, in the order of the calls.

A commit is never abandoned: if it reached the broker late, it could overwrite the next owner's
offset. Pause marks are added to the metadata of commits and removed when it is read.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.model.errors import BrokerError, PartitionLostError
from dagster_rebalance.core.model.events import PartitionsLost
from dagster_rebalance.kafka.group_ports import CommitAnswered, CommitResult

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from collections.abc import Set as AbstractSet

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.kafka.group_ports import GroupEvent, GroupMember, Offsets

logger = logging.getLogger(__name__)

CommitCallback: TypeAlias = "Callable[[Offsets, BrokerError | None], None]"
"""Called with the offsets of a commit and the error that `commit_sync` would raise, or None."""

_PAUSE_MARK = "dr-paused "


def with_mark(metadata: str) -> str:
    """Prepend the pause mark for the next owner of the partition to `metadata`."""
    return _PAUSE_MARK + metadata


def without_mark(metadata: str) -> tuple[str, bool]:
    """Return the metadata without the pause mark, and whether it had one."""
    return metadata.removeprefix(_PAUSE_MARK), metadata.startswith(_PAUSE_MARK)


class CallerCommits:
    """Sends the commits of one consumer and delivers their results.

    The collections in the arguments are live: the assignment of the API, the member's events that
    are not handled yet, and the partitions whose commits carry a pause mark.
    """

    def __init__(
        self,
        member: GroupMember,
        assigned: AbstractSet[TopicPartition],
        pending: Collection[GroupEvent],
        marked: AbstractSet[TopicPartition],
    ) -> None:
        self._member = member
        self._assigned = assigned
        self._pending = pending
        self._marked = marked
        self._unanswered: dict[int, tuple[Offsets, Callable[[CommitResult], None]]] = {}
        self._events: list[GroupEvent] = []
        self._due: list[Callable[[], None]] = []
        self.stored_marks: dict[TopicPartition, bool] = {}
        """Whether Kafka has a pause mark of a partition; without an entry this is not known.
        `CarriedPauses` keeps it; a commit that changes the mark removes the entry."""

    def commit(self, offsets: Offsets, timeout_s: float | None = None) -> CommitResult:
        """Commit in one request and wait for the result.

        A commit without a result within `timeout_s` counts as failed, but may still be stored.
        """
        accepted, refused = self._check_ownership(offsets)
        if not accepted:
            result = CommitResult(frozenset())
        elif timeout_s is None:
            result = self._member.commit(accepted)
        else:
            result = self._commit_within(accepted, timeout_s)
        return CommitResult(result.committed, {**result.failed, **refused})

    def commit_later(self, offsets: Offsets, callback: CommitCallback | None) -> None:
        """Send a commit in one request; its callback is due when the result has arrived."""
        accepted, refused = self._check_ownership(offsets)

        def answered(result: CommitResult) -> None:
            error = CommitResult(result.committed, {**result.failed, **refused}).worst_error()
            self._due.append(lambda: (callback or _log)(offsets, error))

        # Also if no partition is accepted: answers arrive in the order of the calls.
        self._unanswered[self._member.commit_async(accepted)] = (accepted, answered)

    def handle_answer(self, event: CommitAnswered) -> None:
        """Deliver the result of a commit; the result of a timed-out commit is dropped."""
        _, answered = self._unanswered.pop(event.ticket, (None, None))
        if answered:
            answered(event.result)

    @property
    def lost(self) -> frozenset[TopicPartition]:
        """Partitions that the member has reported as lost and `poll` has not reported yet.

        A later event may assign them again.
        """
        return frozenset(
            tp
            for event in (*self._pending, *self._events)
            if isinstance(event, PartitionsLost)
            for tp in event.partitions
        )

    @property
    def has_news(self) -> bool:
        """Whether there are events or callbacks for the next poll."""
        return bool(self._events or self._due)

    def take_events(self) -> list[GroupEvent]:
        """Return, and clear, the events that arrived while a commit waited for its result."""
        events, self._events = self._events, []
        return events

    def take_due(self) -> Iterator[Callable[[], None]]:
        """Yield the callbacks of answered commits, in the order of the answers.

        If the caller stops early, the next call yields the remaining callbacks.
        """
        while self._due:
            yield self._due.pop(0)

    def finish(self, timeout_s: float) -> list[GroupEvent]:
        """Wait for all commits, fail those without a result, and return events as `take_events`."""
        if self._unanswered:
            self._settle(timeout_s)
        for offsets, answered in self._unanswered.values():
            answered(_timed_out(offsets))
        self._unanswered.clear()
        return self.take_events()

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the committed offsets of the group, without pause marks."""
        stored = self._member.committed(partitions, timeout_s)
        return {
            tp: offset and replace(offset, metadata=without_mark(offset.metadata)[0])
            for tp, offset in stored.items()
        }

    def _commit_within(self, offsets: Offsets, timeout_s: float) -> CommitResult:
        # Before any request: `settle` raises if the caller must not wait.
        self._member.settle(0)
        results: list[CommitResult] = []
        self._unanswered[self._member.commit_async(offsets)] = (offsets, results.append)
        self._settle(timeout_s)
        return results[0] if results else _timed_out(offsets)

    def _settle(self, timeout_s: float) -> None:
        self._member.settle(timeout_s)
        for event in self._member.poll(0):
            if isinstance(event, CommitAnswered):
                self.handle_answer(event)
            else:
                self._events.append(event)
            del event  # see `without_frames`

    def _check_ownership(
        self, offsets: Offsets
    ) -> tuple[dict[TopicPartition, OffsetAndMetadata], dict[TopicPartition, BrokerError]]:
        accepted: dict[TopicPartition, OffsetAndMetadata] = {}
        refused: dict[TopicPartition, BrokerError] = {}
        owned = self._member.assignment() - self.lost
        for tp, offset in offsets.items():
            if tp not in self._assigned or tp not in owned:
                message = f"commit for {tp} refused: it is no longer assigned; stop the work on it"
                refused[tp] = PartitionLostError(message, partitions={tp: "not assigned"})
                continue
            is_marked = tp in self._marked
            accepted[tp] = (
                replace(offset, metadata=with_mark(offset.metadata)) if is_marked else offset
            )
            # Before the commit is sent: it may be stored without an answer, and at any later time.
            if self.stored_marks.get(tp) is not is_marked:
                self.stored_marks.pop(tp, None)
        return accepted, refused


def _timed_out(offsets: Offsets) -> CommitResult:
    message = (
        f"a commit of {len(offsets)} partitions was not answered in time, "
        "and may still be stored: commit again"
    )
    return CommitResult(
        frozenset(),
        {
            tp: BrokerError(message, retriable=True, partitions={tp: "not answered in time"})
            for tp in offsets
        },
    )


def _log(offsets: Offsets, error: BrokerError | None) -> None:
    if error is not None:
        logger.warning("commit of %d partitions without a callback failed: %s", len(offsets), error)
