"""What a member gives up: its holds, the loss of partitions, and leaving the group.

`hold` says what one hold is, and makes its steps. Here they begin, one after the other and beside
each other, and here they end: the partitions are forgotten, the receipt is written, and what others
must know of them is told. Owns that a partition which goes, in whatever way, leaves no hold, no
stop and no claim of a streaming run behind that nobody knows of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.settings import (
    EngineSettings,
    HoldBudget,
    LeavePolicy,
    LossPolicy,
)
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.member_events import Occurred
from dagster_rebalance.core.model.offsets import named
from dagster_rebalance.core.model.receipt import Cause, Outcome
from dagster_rebalance.core.partitions.state_machine import Change
from dagster_rebalance.core.revokes.hold import Hold, advance, is_over

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.owned import OwnedPartition
    from dagster_rebalance.core.streaming.claims import StreamClaims

_SHOWN_AFTER_S = 1.0
"""Most holds are over sooner, and then the receipt says it all."""


class HeldPartitions:
    """The partitions that a member has to give up.

    Args:
        settings: How long that may take, and what becomes of runs.
        partitions: All partitions of the member. Those that are gone are taken out.
        streaming: The claims of a streaming run, which leaves some to others.

    Attributes:
        holds: What is given up, in the order of the requests.
        leaving: Why the member leaves the group; None while it stays.
    """

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
        """The partitions whose revoke must still be delayed."""
        return frozenset(
            partition
            for hold in self.holds
            if hold.cause is Cause.REVOKE
            for partition in hold.epochs
        )

    def revoke(self, event: events.RevokeRequested, now: float) -> Iterable[commands.Command]:
        """Begin to give up what Kafka asks back."""
        yield commands.Note(
            f"Kafka asks for {named(event.partitions)} back",
            Occurred.REVOKE_REQUESTED,
            {"partitions": event.partitions},
        )
        self._hold(event.partitions, Cause.REVOKE, self._settings.budget, now)

    def leave(self, event: events.LeaveRequested, now: float) -> Iterable[commands.Command]:
        """Begin to give everything up, or hasten that."""
        hands_over = event.has_successor and self._settings.on_leave is LeavePolicy.RELEASE
        budget = self._settings.budget
        if hands_over:
            # It waits for commits alone, which the end of a hold is kept for.
            budget = budget.within(budget.commit_slice_s)
        if event.limit_s is not None:
            budget = budget.within(event.limit_s)
        if self.leaving is None:
            self.leaving = event.reason
            yield commands.Note(
                f"leaving the group: {event.reason}",
                Occurred.MEMBER_LEAVING,
                {"reason": event.reason},
            )
            self._hold(tuple(self._partitions), Cause.LEAVE, budget, now)
        # What is under way can only get faster: a code server is killed when its time is up,
        # whatever the member began before. A revoke that the leave for a successor overtakes is
        # handed over as well.
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
            asked_back = owned.asked_back()
            self._partitions[owned.partition] = replace(
                asked_back, held_since=held_since, runs_are_known=not asked_back.entries
            )
            epochs[owned.partition] = owned.epoch
        self.holds = (*self.holds, Hold(cause, epochs, now, budget))

    def lose(self, event: events.PartitionsLost, now: float) -> Iterable[commands.Command]:
        """Forget what the member does not own any more, whatever it waited for."""
        is_superseded = event.reason is events.LostReason.SUPERSEDED
        change = Change.SUPERSESSION_NOTICED if is_superseded else Change.LOSS_NOTICED
        outcome = Outcome.SUPERSEDED if is_superseded else Outcome.LOST
        gone = [owned.changed(change) for owned in self._partitions.known(event.partitions)]
        for owned in gone:
            del self._partitions[owned.partition]
        yield commands.Note(
            f"{outcome.value}: {named(event.partitions)}; nothing is committed for them any more",
            Occurred.PARTITIONS_LOST,
            {"partitions": event.partitions, "reason": event.reason},
        )
        runs = {run for owned in gone for run in owned.live_runs}
        if self._settings.on_lost is not LossPolicy.CANCEL:
            # The worker stops in any case: nobody else can wait for a part of its batch.
            runs &= {self._settings.worker}
        if runs:
            yield commands.CancelRuns(tuple(sorted(runs)), f"their partitions were {outcome.value}")
        yield from self._left_to_others(gone)
        kept = []
        for hold in self.holds:
            taken, rest = hold.split(event.partitions)
            if taken.epochs:
                yield commands.RecordReceipt(taken.receipt(gone, now, outcome))
            if rest.epochs or hold.cause is Cause.LEAVE:
                kept.append(rest)
        self.holds = tuple(kept)

    def note_committed(self, after: OwnedPartition, until: int, succeeded: Iterable[str]) -> None:
        """Note in the hold of a partition, if there is one, what was committed for it.

        Args:
            after: The partition.
            until: The offset that was committed.
            succeeded: The runs that the commit is for. A launcher that cannot cancel what it
                launches leaves it alone: such a run may have been asked to end, and succeed.
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

    def advance(self, now: float) -> Iterable[commands.Command]:
        """Make a step of each hold, and end those that are over, those of revokes first.

        The revoke releases a partition that is in the hold of a leave as well.
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
                yield self._shown(hold, held, now)

    def _shown(self, hold: Hold, held: Iterable[OwnedPartition], now: float) -> commands.ShowHold:
        """Tell people of a hold that was not over at once."""
        runs = {run for owned in held for run in owned.live_runs}
        self.holds = tuple(
            replace(other, is_shown=True) if other is hold else other for other in self.holds
        )
        partitions, left_s = tuple(sorted(hold.epochs)), hold.limit_at - now
        return commands.ShowHold(hold.cause, partitions, tuple(sorted(runs)), left_s)

    def _end(
        self, hold: Hold, held: list[OwnedPartition], now: float
    ) -> Iterable[commands.Command]:
        # Runs are still live when the limit of a leave ended the hold of a revoke before its own.
        left = Outcome.HANDED_OVER if hold.hands_over else Outcome.DEADLINE
        outcome = left if any(owned.live_runs for owned in held) else None
        self.holds = tuple(other for other in self.holds if other is not hold)
        if hold.cause is Cause.REVOKE:
            for owned in held:
                owned.changed(Change.RELEASE_COMPLETED)
                del self._partitions[owned.partition]
        if hold.epochs:
            yield commands.RecordReceipt(hold.receipt(held, now, outcome))
        yield from self._left_to_others(held)
        if hold.cause is Cause.LEAVE:
            yield commands.LeaveGroup(self.leaving or "asked to")

    def _left_to_others(self, partitions: Iterable[OwnedPartition]) -> Iterable[commands.Command]:
        """Tell what the next owners find, and clear the stop reasons.

        The owner of a partition shows why it is stopped: the next owner says it again if it still
        holds.
        """
        partitions = tuple(partitions)
        yield from self._streaming.left_behind(partitions)
        for owned in partitions:
            if owned.stop_reason:
                yield commands.ShowStop(owned.partition, "", is_released=True)
