"""The group consumer carries out its member's events.

The events are assignments, revoke requests and losses; at the end it also gives up the partitions
that are left.

Owns the order of things around a rebalance: the lists, the listener, the reading and the release.
Must never decide when it happens: that is poll's. `kafka.consumer.revoke_lists` makes every
decision about the lists.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.events import (
    PartitionsAssigned,
    PartitionsLost,
    PartitionsRevoked,
    RevokeRequested,
)
from dagster_rebalance.core.model.offsets import named
from dagster_rebalance.kafka.consumer.callbacks import Callbacks
from dagster_rebalance.kafka.consumer.carried_pauses import PATIENCE_S
from dagster_rebalance.kafka.consumer.guard import in_turn
from dagster_rebalance.kafka.consumer.operations import ConsumerOperations
from dagster_rebalance.kafka.consumer.revoke_lists import PollStarted, RevokeLists
from dagster_rebalance.kafka.events import (
    CallbackFailed,
    CommitAnswered,
    RequestFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dagster_rebalance.core.model.events import AssignmentEvent
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.client.settings import Settings
    from dagster_rebalance.kafka.consumer.operations import ConsumerGroupMetadata, PauseMarksPolicy
    from dagster_rebalance.kafka.events import MemberEvent
    from dagster_rebalance.kafka.ports import ClusterView, GroupMember
    from dagster_rebalance.kafka.reading.fetcher import Fetcher


class GroupConsumer(ConsumerOperations):
    """A consumer that carries out what its member tells.

    Args:
        member: The member of the group.
        cluster: Answers what is not about the group.
        fetcher: Reads records; None for a consumer that reads none.
        settings: Validated settings.
        pause_marks: What becomes of the mark of a partition that goes.
        clock: A monotonic clock.
    """

    _is_told = False
    """Whether the caller was told what the last poll has found."""

    def __init__(
        self,
        member: GroupMember,
        cluster: ClusterView,
        fetcher: Fetcher | None,
        settings: Settings,
        pause_marks: PauseMarksPolicy,
        *,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(member, cluster, fetcher, settings, pause_marks, clock=clock)
        self._lists = RevokeLists()
        self._events: list[AssignmentEvent] = []
        self._callbacks = Callbacks(self._turn)

    @in_turn
    def group_metadata(self) -> ConsumerGroupMetadata:
        """As `ConsumerOperations.group_metadata`, which cannot see what a poll has not told."""
        metadata = super().group_metadata()
        lost = self._assigned & self._commits.lost
        # In a callback the listener has been told of what is carried out.
        if not (self._is_told or self._turn.in_callback):
            lost |= self._lists.lost
        if lost:
            msg = (
                f"asking for the metadata of group '{self._group_id}' failed: {named(lost)} lost, "
                "which no poll has told yet: poll, then ask again"
            )
            raise BrokerError(msg, retriable=True)
        return metadata

    def _take_part(self, timeout_s: float, *, same_poll: bool) -> bool:
        """Let the member work, and carry out its events.

        Return whether the caller must hear of them at once.
        """
        self._told.extend(self._commits.take_events())
        # In one step of Python's: a signal handler that raises would else take away what the member
        # has just told.
        self._told.extend(chain.from_iterable(map(self._member.poll, (timeout_s,))))
        is_urgent = False
        while self._told:
            event = self._told[0]
            is_urgent |= isinstance(event, (RevokeRequested, PartitionsLost))
            # An event that was interrupted is carried out again, from its beginning, by the next
            # poll.
            self._carry_out(event, same_poll=same_poll)
            self._told.popleft()
        self._call_back_commits()
        return is_urgent

    def _call_back_commits(self) -> None:
        for callback in self._commits.take_due():
            self._callbacks.run(callback)

    def _carry_out(self, event: MemberEvent, *, same_poll: bool) -> None:
        match event:
            case PartitionsAssigned(partitions):
                self._happened(event)
                self._take_in(partitions)
            case RevokeRequested(partitions) if same_poll:
                self._lists.request(partitions)
                self._tell_revoked(self._lists.to_be_revoked)
                self._give_away(self._lists.complete())
            case RevokeRequested(partitions):
                self._happened(event)
                self._lists.request(partitions)
                self._withhold_revoked()
            case PartitionsLost(partitions, reason):
                gone = (self._assigned | self._lists.lost).intersection(partitions)
                # What this very poll has completed is no loss to the caller, though Kafka did not
                # hear of its release any more.
                self._lists.lose(gone | self._lists.unreleased.intersection(partitions))
                self._happened(PartitionsLost(tuple(sorted(gone)), reason))
                self._forget(gone)
                self._settle_marks(())
                self._withhold_revoked()
                if gone:
                    self._callbacks.tell("on_partitions_lost", gone, self)
            case CommitAnswered():
                self._commits.answered(event)
            case RequestFailed(error) | CallbackFailed(error):
                self._callbacks.note(error)

    def _happened(self, event: AssignmentEvent) -> None:
        """Keep an event for the caller; one that is carried out again is the same."""
        if event.partitions and event not in self._events[-1:]:
            self._events.append(event)

    def _take_in(self, partitions: Collection[TopicPartition]) -> None:
        self._lists.assign(partitions)
        self._assigned.update(partitions)
        self._settle_marks(partitions)
        carried = self._carried
        if carried:
            carried.expect(partitions)
            self._callbacks.run(lambda: carried.read(carried.patience_s))
        if self._fetcher:
            self._fetcher.stage(partitions)
        self._withhold()
        self._callbacks.tell("on_partitions_assigned", partitions, self)

    def _complete_due(self) -> bool:
        """Begin a poll; whether the one before has found something that its caller was not told."""
        if not self._is_told:
            self._lists.untold()
        self._forget_told_events()
        if self._carried:
            self._exchange_marks(self._carried.patience_s)
        due = self._lists.start_poll()
        self._tell_revoked(due.completed & self._assigned)
        self._give_away(due)
        return due.news

    def _untell(self) -> None:
        """Take back a poll that has told nobody.

        The fetcher reads its records again, and the next poll tells its findings.
        """
        self._is_told = False
        self._withhold()
        if self._fetcher:
            self._fetcher.put_back_unseen()

    def _forget_told_events(self) -> None:
        if self._is_told:
            self._events.clear()
        self._is_told = False

    def _give_away(self, due: PollStarted) -> None:
        """Carry out what is due; after an exception, the next poll does it again."""
        if due.completed:
            self._forget(due.completed)
        if due.release:
            # A hold that the caller has not heard of yet belongs to a later membership.
            if self._member.held and self._member.held <= due.release:
                self._member.release()
            self._lists.released()
        self._withhold_revoked()

    def _withhold_revoked(self) -> None:
        if self._revoking != self._lists.unreleased:
            self._revoking = self._lists.unreleased
            self._withhold()

    def _leave_behind(self, timeout_s: float) -> float:
        """Give everything up for the API; what is left of the time to wait for Kafka."""
        self._forget_told_events()
        self._callbacks.begin()
        left_s = self._finish_commits(timeout_s)
        left_s = self._tell_revoked(self.assignment(), left_s)
        # The callback may have committed as well.
        left_s = self._finish_commits(left_s)
        self._lists = RevokeLists()
        self._forget(self.assignment())
        self._settle_marks(())
        self._withhold_revoked()
        return left_s

    def _finish_commits(self, timeout_s: float) -> float:
        started_at = self._clock()
        self._close_news()
        self._told.extend(self._commits.finish(timeout_s))
        left_s = max(0.0, timeout_s - (self._clock() - started_at))
        self._close_news()
        self._call_back_commits()
        return left_s

    def _close_news(self) -> None:
        """Carry out what still has a meaning of the member's news, and forget the rest."""
        while self._told:
            event = self._told[0]
            if isinstance(event, (PartitionsLost, CallbackFailed, CommitAnswered)):
                self._carry_out(event, same_poll=False)
            self._told.popleft()

    def _tell_revoked(
        self, partitions: Collection[TopicPartition], marks_limit_s: float = PATIENCE_S
    ) -> float:
        """Tell the listener, and store pause marks; what is left of the time for the marks."""
        if not partitions:
            return marks_limit_s
        self._happened(PartitionsRevoked(tuple(sorted(partitions))))
        self._callbacks.tell("on_partitions_revoked", partitions, self)
        return self._exchange_marks(marks_limit_s)

    def _exchange_marks(self, limit_s: float) -> float:
        """Read and write the marks that travel; what is left of the time."""
        carried, deadline = self._carried, self._clock() + limit_s
        if not carried:
            return limit_s
        unread = carried.unread
        self._callbacks.run(lambda: carried.read(limit_s))
        self._callbacks.run(lambda: carried.write(self._assigned, deadline - self._clock()))
        if unread:
            self._withhold()
        return max(0.0, deadline - self._clock())

    def _forget(self, partitions: Collection[TopicPartition]) -> None:
        self._assigned.difference_update(partitions)
        self._forget_marks(partitions)
        if self._fetcher:
            self._fetcher.drop(partitions)
