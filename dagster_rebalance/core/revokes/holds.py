"""The partitions that a member gives up: its holds, lost partitions and the leave of the group.

`hold` has the steps of one hold. This module begins holds, ends them, drops their partitions and
reports to others. A partition that is given up leaves no hold, no shown stop and no unreported
claim of a streaming run behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.batches.settings import (
    EngineSettings,
    HoldBudget,
    LeavePolicy,
    LossPolicy,
)
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.member_events import EventKind
from dagster_rebalance.core.model.offsets import names_of
from dagster_rebalance.core.model.receipt import Cause, HoldOutcome
from dagster_rebalance.core.partitions.state_machine import Change
from dagster_rebalance.core.revokes.hold import Hold, advance, is_over

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.owned import OwnedPartition
    from dagster_rebalance.core.streaming.stream_claims import StreamClaims

    _Commands: TypeAlias = Iterable[commands.Command]

_SHOWN_AFTER_S = 1.0
"""Most holds end sooner, and their receipt is enough."""
SUCCESSOR_TIMEOUT_S = 60.0
"""A successor whose heartbeat has not changed for this time is gone; it changes every 15 s."""


class HeldPartitions:
    """The holds of a member, in the order of their requests, and why it leaves the group."""

    def __init__(
        self, settings: EngineSettings, partitions: AssignedPartitions, streaming: StreamClaims
    ) -> None:
        self._settings = settings
        self._partitions = partitions
        self._streaming = streaming
        self.holds: tuple[Hold, ...] = ()
        self.leaving: str | None = None

    @property
    def revoked(self) -> frozenset[TopicPartition]:
        """The partitions whose revoke must be delayed."""
        return frozenset(
            partition
            for hold in self.holds
            if hold.cause is Cause.REVOKE
            for partition in hold.epochs
        )

    def revoke(self, event: events.RevokeRequested, now: float) -> _Commands:
        """Begin the hold of a revoke."""
        yield commands.Note(
            f"Kafka asks for {names_of(event.partitions)} back",
            EventKind.REVOKE_REQUESTED,
            {"partitions": event.partitions},
        )
        self._hold(event.partitions, Cause.REVOKE, self._settings.budget, now)

    def leave(self, event: events.LeaveRequested, now: float) -> _Commands:
        """Begin the hold of a leave, or shorten it."""
        hands_over = event.has_successor and self._settings.on_leave is LeavePolicy.RELEASE
        budget = self._settings.budget
        if hands_over:  # only the last commits are waited for
            budget = budget.within(budget.commit_slice_s)
        if event.limit_s is not None:
            budget = budget.within(event.limit_s)
        if self.leaving is None:
            self.leaving = event.reason
            yield commands.Note(
                f"leaving the group: {event.reason}",
                EventKind.MEMBER_LEAVING,
                {"reason": event.reason},
            )
            self._hold(tuple(self._partitions), Cause.LEAVE, budget, now)
        # A later request can only shorten the leave: a code server is killed when its time is up.
        # A leave for a successor also hands over the revokes that it overtakes.
        self.holds = tuple(
            hold.hastened(budget, now, hands_over=hands_over)
            if hands_over or hold.cause is Cause.LEAVE
            else hold
            for hold in self.holds
        )

    def _hold(
        self, partitions: Iterable[TopicPartition], cause: Cause, budget: HoldBudget, now: float
    ) -> None:
        epochs = {}
        for owned in self._partitions.known(partitions):
            held_since = now if owned.held_since is None else owned.held_since
            asked_back = owned.draining()
            self._partitions[owned.partition] = replace(
                asked_back, held_since=held_since, runs_are_known=not asked_back.entries
            )
            epochs[owned.partition] = owned.epoch
        self.holds = (*self.holds, Hold(cause, epochs, now, budget))

    def lose(self, event: events.PartitionsLost, now: float) -> _Commands:
        """Drop lost partitions at once, whatever they wait for."""
        is_superseded = event.reason is events.LostReason.SUPERSEDED
        change = Change.SUPERSESSION_NOTICED if is_superseded else Change.LOSS_NOTICED
        outcome = HoldOutcome.SUPERSEDED if is_superseded else HoldOutcome.LOST
        lost = [owned.changed(change) for owned in self._partitions.known(event.partitions)]
        for owned in lost:
            del self._partitions[owned.partition]
        yield commands.Note(
            f"{outcome.value}: {names_of(event.partitions)}; nothing is committed for them any "
            "more",
            EventKind.PARTITIONS_LOST,
            {"partitions": event.partitions, "reason": event.reason},
        )
        runs = {run for owned in lost for run in owned.live_runs}
        if self._settings.on_lost is not LossPolicy.CANCEL:
            # A streaming run always stops its batch: the next owner cannot adopt a part of it.
            runs &= {self._settings.worker}
        if runs:
            yield commands.CancelRuns(tuple(sorted(runs)), f"their partitions were {outcome.value}")
        yield from self._report_given_up(lost)
        kept = []
        for hold in self.holds:
            part, rest = hold.split(event.partitions)
            if part.epochs:
                yield commands.RecordReceipt(part.receipt(lost, now, outcome))
            if rest.epochs or hold.cause is Cause.LEAVE:
                kept.append(rest)
        self.holds = tuple(kept)

    def note_committed(self, after: OwnedPartition, until: int, succeeded: Iterable[str]) -> None:
        """Note a commit in the hold of its partition, if there is one.

        A run that succeeded no longer counts as cancelled: its launcher may be unable to cancel.
        """
        self.holds = tuple(
            replace(
                hold,
                committed={**hold.committed, after.partition: until},
                cancelled=hold.cancelled.difference(succeeded),
            )
            if hold.epochs.get(after.partition) == after.epoch
            else hold
            for hold in self.holds
        )

    def advance(self, now: float) -> _Commands:
        """Make a step of each hold and end those that are over.

        Revokes end first: a revoke also releases a partition that is in the hold of a leave.
        """
        advanced = []
        for hold in self.holds:
            step = advance(hold, self._partitions.known(hold.epochs), self._settings, now)
            advanced.append(step.hold)
            self._partitions.update({owned.partition: owned for owned in step.drained})
            yield from step.cancels
        self.holds = tuple(advanced)
        for hold in sorted(self.holds, key=lambda hold: hold.cause is Cause.LEAVE):
            held = self._partitions.known(hold.epochs)
            if is_over(held):
                yield from self._end(hold, held, now)
            elif not hold.is_shown and now - hold.requested_at >= _SHOWN_AFTER_S:
                yield self._show(hold, held, now)

    def _show(self, hold: Hold, held: Iterable[OwnedPartition], now: float) -> commands.ShowHold:
        runs = {run for owned in held for run in owned.live_runs}
        self.holds = tuple(
            replace(other, is_shown=True) if other is hold else other for other in self.holds
        )
        partitions, left_s = tuple(sorted(hold.epochs)), hold.limit_at - now
        return commands.ShowHold(hold.cause, partitions, tuple(sorted(runs)), left_s)

    def _end(self, hold: Hold, held: list[OwnedPartition], now: float) -> _Commands:
        # Runs are live if the limit of a leave ended the hold of a revoke before its own limit.
        left = HoldOutcome.HANDED_OVER if hold.hands_over else HoldOutcome.DEADLINE
        outcome = left if any(owned.live_runs for owned in held) else None
        self.holds = tuple(other for other in self.holds if other is not hold)
        if hold.cause is Cause.REVOKE:
            for owned in held:
                owned.changed(Change.RELEASE_COMPLETED)
                del self._partitions[owned.partition]
        if hold.epochs:
            yield commands.RecordReceipt(hold.receipt(held, now, outcome))
        yield from self._report_given_up(held)
        if hold.cause is Cause.LEAVE:
            yield commands.LeaveGroup(self.leaving or "asked to")

    def _report_given_up(self, given_up: list[OwnedPartition]) -> _Commands:
        """Report claims of a streaming run, and clear stops: the next owner shows them again."""
        yield from self._streaming.abandoned(given_up)
        for owned in given_up:
            if owned.stop_reason:
                yield commands.ShowStop(owned.partition, "", is_released=True)


@dataclass(frozen=True, slots=True)
class HandoverBackoff:
    """Back-off of a process that left the group for its successor.

    Dagster sends ticks to each replica of a code server in turn. Without the back-off, each replica
    would make the other one leave, and they would hand the partitions to each other forever.

    Attributes:
        heartbeat: The last heartbeat of the member with this sensor's lease; empty once it left.
        since: When this process first read that heartbeat, on its own clock.
    """

    heartbeat: str
    since: float

    def observe(self, heartbeat: str, now: float) -> HandoverBackoff:
        """Return the back-off after another read of the lease."""
        is_same = heartbeat == self.heartbeat
        return self if is_same else replace(self, heartbeat=heartbeat, since=now)

    def may_join(self, now: float) -> bool:
        """Whether the successor has left, or shows no new heartbeat for `SUCCESSOR_TIMEOUT_S`."""
        return not self.heartbeat or now - self.since >= SUCCESSOR_TIMEOUT_S
