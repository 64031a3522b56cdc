"""Apply the member's events: assignments, revoke requests, lost partitions and commit results.

Defines the order of the rebalance steps: update the revoke lists, call the listener, stop the
fetcher, release to Kafka. `kafka.consumer.revoke_lists` decides what is on which list.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.events import (
    PartitionsAssigned,
    PartitionsLost,
    PartitionsRevoked,
    RevokeRequested,
)
from dagster_rebalance.kafka.consumer.callbacks import Callbacks
from dagster_rebalance.kafka.consumer.pauses import MARKS_LIMIT_S
from dagster_rebalance.kafka.consumer.revoke_lists import DueRevokes, RevokeLists
from dagster_rebalance.kafka.group_ports import CallbackFailed, CommitAnswered, RequestFailed

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.core.model.events import AssignmentEvent
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.consumer.state import ConsumerState
    from dagster_rebalance.kafka.group_ports import GroupEvent


_POLL_AGAIN_S = 0.1
"""How long polls return records without polling the member, if nothing happens in the group."""


class RebalanceHandler:
    """Applies the events of one consumer's member to its state.

    A signal handler may raise at any step. An interrupted event is applied again by the next poll,
    from its beginning.
    """

    def __init__(self, state: ConsumerState) -> None:
        self._state = state
        self.callbacks = Callbacks(state)
        self.events: list[AssignmentEvent] = []
        """The changes of the assignment since the last delivered poll."""
        self._poll_at = -math.inf

    @property
    def is_quiet(self) -> bool:
        """Whether a poll may omit the member, which was polled just now and has no news."""
        state = self._state
        return not (state.member.has_news or state.commits.has_news) and (
            state.clock() < self._poll_at
        )

    def poll_again(self) -> None:
        """Let the next poll poll the member."""
        self._poll_at = -math.inf

    def start_poll(self) -> bool:
        """Complete due revokes; return whether the poll must return without delay.

        The poll must if the caller did not receive the revokes and lost partitions of the last one.
        """
        state = self._state
        if not state.is_delivered:
            state.revokes.mark_undelivered()
        self._clear_delivered_events()
        if state.carried_pauses:
            self._sync_marks(state.carried_pauses.limit_s)
        due = state.revokes.start_poll()
        self._notify_revoked(due.completed & state.assigned)
        self._complete(due)
        return due.has_undelivered

    def poll_member(self, timeout_s: float, *, same_poll: bool) -> bool:
        """Poll the member for at most `timeout_s`, and apply its events.

        With `same_poll`, requested revokes are completed at once. Return whether the caller must
        receive the events without delay.
        """
        pending = self._state.pending_events
        pending.extend(self._state.commits.take_events())
        # In one step of the interpreter, or a signal handler that raises could drop the events.
        pending.extend(chain.from_iterable(map(self._state.member.poll, (timeout_s,))))
        is_urgent = False
        while pending:
            event = pending[0]
            is_urgent |= isinstance(event, (RevokeRequested, PartitionsLost))
            self._apply(event, same_poll=same_poll)
            pending.popleft()
            del event  # see `without_frames`
        self._run_commit_callbacks()
        state = self._state
        is_over = not (self.events or state.revoking or state.revokes.lost or state.carried_pauses)
        self._poll_at = state.clock() + _POLL_AGAIN_S if is_over else -math.inf
        return is_urgent

    def redeliver(self) -> None:
        """Let the next poll return the records and the events of an undelivered poll again."""
        self._state.is_delivered = False
        self.poll_again()
        self._state.withhold()
        if self._state.fetcher:
            self._state.fetcher.put_back_unseen()

    def give_up_all(self, timeout_s: float) -> float:
        """Revoke all partitions for the API; return the time left to wait for Kafka."""
        state = self._state
        self.poll_again()
        self._clear_delivered_events()
        self.callbacks.begin()
        left_s = self._finish_commits(timeout_s)
        left_s = self._notify_revoked(frozenset(state.assigned), left_s)
        # The callback may have committed.
        left_s = self._finish_commits(left_s)
        state.revokes = RevokeLists()
        state.unassign(frozenset(state.assigned))
        state.clear_marks_except(())
        state.update_revoking()
        return left_s

    def _run_commit_callbacks(self) -> None:
        for callback in self._state.commits.take_due():
            self.callbacks.run(callback)

    def _apply(self, event: GroupEvent, *, same_poll: bool) -> None:
        state = self._state
        match event:
            case PartitionsAssigned(partitions):
                self._record(event)
                self._assign(partitions)
            case RevokeRequested(partitions) if same_poll:
                state.revokes.request(partitions)
                self._notify_revoked(state.revokes.to_be_revoked)
                self._complete(state.revokes.complete())
            case RevokeRequested(partitions):
                self._record(event)
                state.revokes.request(partitions)
                state.update_revoking()
            case PartitionsLost():
                self._lose(event)
            case CommitAnswered():
                state.commits.handle_answer(event)
            case RequestFailed(error) | CallbackFailed(error):
                self.callbacks.defer(error)

    def _record(self, event: AssignmentEvent) -> None:
        """Keep an event for the caller. An event that is applied twice is kept once."""
        if event.partitions and event not in self.events[-1:]:
            self.events.append(event)

    def _assign(self, partitions: Collection[TopicPartition]) -> None:
        state, carried = self._state, self._state.carried_pauses
        state.revokes.assign(partitions)
        state.assigned.update(partitions)
        state.clear_marks_except(partitions)
        if carried:
            carried.expect(partitions)
            self.callbacks.run(lambda: carried.read(carried.limit_s))
        if state.fetcher:
            state.fetcher.stage(partitions)
        state.withhold()
        self.callbacks.notify("on_partitions_assigned", partitions)

    def _lose(self, event: PartitionsLost) -> None:
        state, revokes = self._state, self._state.revokes
        lost = (state.assigned | revokes.lost).intersection(event.partitions)
        # Partitions that this poll has completed are not lost for the caller, although Kafka did
        # not receive their release.
        revokes.lose(lost | revokes.unreleased.intersection(event.partitions))
        self._record(PartitionsLost(tuple(sorted(lost)), event.reason))
        state.unassign(lost)
        state.clear_marks_except(())
        state.update_revoking()
        if lost:
            self.callbacks.notify("on_partitions_lost", lost)

    def _clear_delivered_events(self) -> None:
        if self._state.is_delivered:
            self.events.clear()
        self._state.is_delivered = False

    def _complete(self, due: DueRevokes) -> None:
        """Unassign completed partitions, and release a hold. If interrupted, the next poll does."""
        state = self._state
        if due.completed:
            state.unassign(due.completed)
        if due.release:
            # A hold that was not applied yet belongs to a later membership.
            if state.member.held and state.member.held <= due.release:
                state.member.release()
            state.revokes.released()
        state.update_revoking()

    def _finish_commits(self, timeout_s: float) -> float:
        started_at = self._state.clock()
        self._drain_pending()
        self._state.pending_events.extend(self._state.commits.finish(timeout_s))
        left_s = max(0.0, timeout_s - (self._state.clock() - started_at))
        self._drain_pending()
        self._run_commit_callbacks()
        return left_s

    def _drain_pending(self) -> None:
        """Apply the pending events that still matter at the end, and drop the others."""
        pending = self._state.pending_events
        while pending:
            event = pending[0]
            if isinstance(event, (PartitionsLost, CallbackFailed, CommitAnswered)):
                self._apply(event, same_poll=False)
            pending.popleft()

    def _notify_revoked(
        self, partitions: Collection[TopicPartition], marks_limit_s: float = MARKS_LIMIT_S
    ) -> float:
        """Call the listener and store pause marks; return the time left of the limit."""
        if not partitions:
            return marks_limit_s
        self._record(PartitionsRevoked(tuple(sorted(partitions))))
        self.callbacks.notify("on_partitions_revoked", partitions)
        return self._sync_marks(marks_limit_s)

    def _sync_marks(self, limit_s: float) -> float:
        """Read and write carried pause marks; return the time left of the limit."""
        clock, carried = self._state.clock, self._state.carried_pauses
        deadline = clock() + limit_s
        if not carried:
            return limit_s
        unread = carried.unread
        self.callbacks.run(lambda: carried.read(limit_s))
        self.callbacks.run(lambda: carried.write(self._state.assigned, deadline - clock()))
        if unread:
            self._state.withhold()
        return max(0.0, deadline - clock())
