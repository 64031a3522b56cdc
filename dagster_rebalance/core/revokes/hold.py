"""Holds: partitions that must be given up, from the request to the release.

Theory of operation. In KIP-983's terms, a hold is a delayed revoke. It begins when Kafka requests a
revoke, or when the member leaves the group. `Hold` has the partitions, each with its epoch, and a
time budget. The partitions stay assigned, and results of their runs are committed. Each call of the
engine then makes one step, `advance`:

1. Cancel. Runs that have not started are cancelled at once. At the deadline, which leaves a slice
   of the limit for the last commits, the other runs are cancelled too, or left running
   (`on_deadline`).
2. Drained? `waits_of` lists the reasons why a partition waits: live runs, a read of its runs since
   the request, commits. A partition without a reason is drained. Operators see the same list.
3. Too late? At the limit a partition is released even if it still waits. Its claims stay, and the
   next owner takes the work over. If runs are left running, the partition is released as soon as it
   waits for nothing else.

A hold is over when all its partitions are drained (`is_over`). The engine then writes the receipt
and drops the partitions and the hold. The member loop delays exactly the partitions that the engine
holds, so the next poll of the consumer completes the revoke. One hold is one release, because a
member acknowledges a revoke request as a whole.

A leave is a hold of all partitions after which the member closes. A partition can be in the hold of
a revoke and of a leave. A loss ends a hold, or the affected part of it, at any step.
`HeldPartitions` begins and ends the holds of a member. Once a partition is given up, it has no
hold, no shown stop and no unreported claim of a streaming run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from dagster_rebalance.core.batches.engine_settings import (
    ROUNDING_S,
    DeadlinePolicy,
    EngineSettings,
    HoldBudget,
    LeavePolicy,
    LossPolicy,
)
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.commands import CancelRuns, Cause, HoldOutcome, Receipt
from dagster_rebalance.core.model.member_events import EventKind
from dagster_rebalance.core.model.offsets import OffsetRange, names_of
from dagster_rebalance.core.model.run_snapshot import format_runs
from dagster_rebalance.core.partitions.assigned import Role
from dagster_rebalance.core.partitions.state_machine import Change, Phase
from dagster_rebalance.core.runs.progress import InFlight, ToRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.partitions.assigned import AssignedPartitions
    from dagster_rebalance.core.partitions.owned import OwnedPartition
    from dagster_rebalance.core.streaming.stream_claims import StreamClaims

    _Commands: TypeAlias = Iterable[commands.Command]
    _Partitions: TypeAlias = frozenset[TopicPartition]


_DURATIONS_KEPT = 10
_MIN_DURATIONS = 3
_MIN_DURATION_S = 1.0
_RECORDING_LIMIT_S = 2.0
"""How long a hold waits for more than `_MANY_RECORDS` records. The next owner records the rest."""
_MANY_RECORDS = 100
_SHOWN_AFTER_S = 1.0
"""Most holds end sooner, and their receipt is enough."""
_MAX_WAITS_NAMED = 10  # a tick stores the list, and a hold may have 1,000 partitions


@dataclass(frozen=True, slots=True)
class Hold:
    """Partitions of a revoke or a leave, which are released together.

    Attributes:
        epochs: The partitions, each with the epoch in which it is held.
        run_ids: All runs that the hold has waited for.
        committed: The offsets committed during the hold, by partition.
        is_past_deadline: Whether runs were still live at the deadline.
        hands_over: Whether live runs are left to the successor. The hold then waits for commits
            only.
        recording_since: When the hold began to wait only for records in Dagster, and for many.
        is_shown: Whether the hold was shown to operators. A hold that ends at once has only a
            receipt.
    """

    cause: Cause
    epochs: dict[TopicPartition, int]
    requested_at: float
    budget: HoldBudget
    run_ids: frozenset[str] = frozenset()
    cancelled: frozenset[str] = frozenset()
    cancelled_at: float | None = None
    committed: dict[TopicPartition, int] = field(default_factory=dict)
    is_past_deadline: bool = False
    hands_over: bool = False
    recording_since: float | None = None
    is_shown: bool = False

    @property
    def deadline_at(self) -> float:
        """When the deadline policy is applied."""
        return self.limit_at - self.budget.commit_slice_s

    @property
    def limit_at(self) -> float:
        """When the partitions are released in any case."""
        return self.requested_at + self.budget.limit_s

    def due_times(self, settings: EngineSettings) -> Iterable[float]:
        """Yield when a step of the hold may change without an event; ignore past times."""
        yield self.deadline_at
        yield self.limit_at
        if self.cancelled_at is not None:
            yield self.cancelled_at + settings.retry_s
        if self.recording_since is not None:
            yield self.recording_since + _RECORDING_LIMIT_S
        if not self.is_shown:
            yield self.requested_at + _SHOWN_AFTER_S

    def hastened(self, budget: HoldBudget, now: float, *, hands_over: bool) -> Hold:
        """Return the hold with the limit of another request, if that limit is earlier."""
        hold = replace(self, hands_over=self.hands_over or hands_over)
        if now + budget.limit_s >= self.limit_at:
            return hold
        return replace(
            hold, budget=replace(budget, limit_s=now - self.requested_at + budget.limit_s)
        )

    def split(self, partitions: Collection[TopicPartition]) -> tuple[Hold, Hold]:
        """Return the part of the hold with these partitions, and the rest."""
        part = {p: epoch for p, epoch in self.epochs.items() if p in partitions}
        rest = {p: epoch for p, epoch in self.epochs.items() if p not in part}
        committed = {p: offset for p, offset in self.committed.items() if p in part}
        return replace(self, epochs=part, committed=committed), replace(self, epochs=rest)

    @property
    def outcome(self) -> HoldOutcome:
        """The outcome if the partitions are released now."""
        if self.is_past_deadline:
            return HoldOutcome.HANDED_OVER if self.hands_over else HoldOutcome.DEADLINE
        return HoldOutcome.DRAINED if self.run_ids or self.committed else HoldOutcome.NOTHING_TO_DO

    def _outcome(self, held: Iterable[OwnedPartition]) -> HoldOutcome:
        """The outcome, given that another hold may have interrupted the runs of this one."""
        interrupted = (
            entry.progress.streak.run_id
            for owned in held
            for entry in owned.entries
            if isinstance(entry.progress, ToRequest)
            and entry.progress.streak is not None
            and entry.progress.interruptions
        )
        is_drained = self.outcome is HoldOutcome.DRAINED
        return (
            HoldOutcome.DEADLINE if is_drained and self.run_ids & {*interrupted} else self.outcome
        )

    def receipt(
        self, held: Iterable[OwnedPartition], now: float, outcome: HoldOutcome | None = None
    ) -> Receipt:
        """Return the receipt. Pass `outcome` if the hold does not end in a release."""
        held = tuple(held)
        handed_over = [o.partition for o in held if o.entries and o.partition in self.epochs]
        return Receipt(
            outcome=outcome or self._outcome(held),
            cause=self.cause,
            partitions=tuple(sorted(self.epochs)),
            seconds=now - self.requested_at,
            committed=dict(self.committed),
            run_ids=tuple(sorted(self.run_ids)),
            cancelled=tuple(sorted(self.cancelled)),
            handed_over=tuple(sorted(handed_over)),
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """Estimate of the end of running batches, from the last claim-to-commit times (oldest first).

    It informs operators and influences no decision.
    """

    durations_s: tuple[float, ...] = ()

    def with_duration(self, duration_s: float) -> Forecast:
        """Return the forecast after another commit."""
        return Forecast((*self.durations_s, duration_s)[-_DURATIONS_KEPT:])

    def remaining(self, claimed_at: Iterable[float], now: float) -> str:
        """Describe how long the batches claimed at these times still take; empty if unknown."""
        claims = tuple(claimed_at)
        is_known = len(self.durations_s) >= _MIN_DURATIONS
        usual_s = median(self.durations_s) if is_known else 0.0
        if not claims or usual_s < _MIN_DURATION_S:
            return ""
        left_s = max(claims) + usual_s - now
        likely = f"likely for {left_s:.0f} s more" if left_s > 0 else "already longer than usual"
        return f"{likely} (batches took {usual_s:.0f} s)"


class Wait(NamedTuple):
    """A reason why a draining partition waits: live runs, or an outstanding `answer`."""

    where: OffsetRange | TopicPartition
    run_ids: tuple[str, ...] = ()
    answer: str = ""
    is_record: bool = False

    @property
    def subject(self) -> str:
        """The reason without its partition or range."""
        return self.answer or f"{format_runs(self.run_ids)} on"


def named_waits(waits: Iterable[Wait]) -> str:
    """List the first reasons, each once with all its partitions."""
    places: dict[str, list[OffsetRange | TopicPartition]] = {}
    for wait in waits:
        places.setdefault(wait.subject, []).append(wait.where)
    shown = [
        f"{subject} {_named_places(places[subject])}"
        for subject in islice(places, _MAX_WAITS_NAMED)
    ]
    more = len(places) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _named_places(places: Sequence[OffsetRange | TopicPartition]) -> str:
    """Name a single range in full, and several by their partitions."""
    if len(places) == 1:
        return str(places[0])
    return names_of({p.topic_partition if isinstance(p, OffsetRange) else p for p in places})


def waits_of(owned: OwnedPartition, *, hands_over: bool = False) -> tuple[Wait, ...]:
    """Return the reasons why a draining partition waits.

    The partition does not wait for a commit that Kafka refuses: the claim stays for the next owner.
    With `hands_over`, the partition does not wait for runs.
    """
    waits: list[Wait] = []
    if not hands_over:
        waits += [
            Wait(e.range, e.progress.run_ids)
            for e in owned.entries
            if isinstance(e.progress, InFlight)
        ]
    if not owned.runs_are_known:
        waits.append(Wait(owned.partition, answer="Dagster to list the runs on"))
    committing = owned.committing
    is_refused = owned.pending is not None and bool(owned.pending.refused)
    if committing is not None and not is_refused:
        waits.append(Wait(committing.range, answer="Kafka to confirm the commit of"))
    if owned.unrecorded:
        recording = "Dagster to record the commit of"
        waits.append(Wait(owned.unrecorded.range, answer=recording, is_record=True))
    return tuple(waits)


class Step(NamedTuple):
    """Result of one step: the new hold, the drained partitions and the runs to cancel."""

    hold: Hold
    drained: tuple[OwnedPartition, ...]
    cancels: tuple[CancelRuns, ...]


def advance(
    hold: Hold, held: Collection[OwnedPartition], settings: EngineSettings, now: float
) -> Step:
    """Make one step of a hold: cancel runs, and find drained and overdue partitions."""
    is_late = hold.hands_over or now >= hold.deadline_at
    cancels_all = is_late and not hold.hands_over and settings.on_deadline is DeadlinePolicy.CANCEL
    live = _union(owned.live_runs for owned in held)
    hold, cancels = _cancel(
        replace(hold, run_ids=hold.run_ids | live),
        held,
        settings.retry_s,
        now,
        cancels_all=cancels_all,
    )
    draining = [(owned, waits_of(owned)) for owned in held if owned.phase is Phase.DRAINING]
    recording_since = _recording_since(hold, [waits for _, waits in draining if waits], now)
    leaves_records = recording_since is not None and now - recording_since >= _RECORDING_LIMIT_S
    drained, is_overdue = [], False
    for owned, waits in draining:
        if not waits or leaves_records:
            drained.append(owned.changed(Change.DRAIN_FINISHED))
        elif now >= hold.limit_at or (
            is_late and not cancels_all and not waits_of(owned, hands_over=True)
        ):
            drained.append(owned.changed(Change.DEADLINE_PASSED))
            is_overdue = True
    is_past_deadline = hold.is_past_deadline or is_overdue or (cancels_all and bool(live))
    hold = replace(hold, is_past_deadline=is_past_deadline, recording_since=recording_since)
    return Step(hold, tuple(drained), cancels)


def _recording_since(hold: Hold, waits: list[tuple[Wait, ...]], now: float) -> float | None:
    """Since when a hold waits for many records and nothing else, or None."""
    if not all(wait.is_record for one in waits for wait in one):
        return None
    is_first = hold.recording_since is None
    return now if is_first and len(waits) > _MANY_RECORDS else hold.recording_since


def is_over(held: Iterable[OwnedPartition]) -> bool:
    """Whether the hold of these partitions has ended."""
    return all(owned.phase is Phase.DRAINED for owned in held)


def _cancel(
    hold: Hold, held: Collection[OwnedPartition], retry_s: float, now: float, *, cancels_all: bool
) -> tuple[Hold, tuple[CancelRuns, ...]]:
    """Cancel runs, and repeat the request after `retry_s`."""
    if cancels_all:
        unwanted = _union(owned.live_runs for owned in held)
    else:
        # A run that has started in the meantime was not cancelled (`only_unstarted`).
        started = _union(owned.started_runs for owned in held)
        hold = replace(hold, cancelled=hold.cancelled - started)
        unwanted = (
            frozenset() if hold.hands_over else _union(owned.unstarted_runs for owned in held)
        )
    is_due_again = hold.cancelled_at is not None and now - hold.cancelled_at >= retry_s
    due = unwanted if is_due_again else unwanted - hold.cancelled
    if not due:
        return hold, ()
    why = "the drain deadline has passed" if cancels_all else "the runs have not started"
    cancel = CancelRuns(
        tuple(sorted(due)),
        f"{names_of(hold.epochs)} must be given up, and {why}",
        only_unstarted=not cancels_all,
        is_again=due <= hold.cancelled,
    )
    return replace(hold, cancelled=hold.cancelled | due, cancelled_at=now), (cancel,)


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


SUCCESSOR_TIMEOUT_S = 60.0
"""If its heartbeat has not changed for this time, a successor is gone; it changes every 15 s."""


class HeldPartitions:
    """The holds of a member, in the order of their requests, and why the member leaves."""

    def __init__(
        self, settings: EngineSettings, partitions: AssignedPartitions, streaming: StreamClaims
    ) -> None:
        self._settings = settings
        self._partitions = partitions
        self._streaming = streaming
        self.holds: tuple[Hold, ...] = ()
        self.leaving: str | None = None
        self._advanced: tuple[tuple[Hold, ...], int, float] = ((), 0, float("-inf"))
        self._named: tuple[list[dict[TopicPartition, int]], _Partitions, _Partitions] = (
            [],
            frozenset(),
            frozenset(),
        )

    @property
    def held(self) -> frozenset[TopicPartition]:
        """All partitions that must be given up; the same set until they change."""
        return self._described()[0]

    @property
    def revoked(self) -> frozenset[TopicPartition]:
        """The partitions whose revoke must be delayed; the same set until they change."""
        return self._described()[1]

    def _described(self) -> tuple[_Partitions, _Partitions]:
        epochs = [hold.epochs for hold in self.holds]
        if list(map(id, epochs)) != list(map(id, self._named[0])):
            revoked = (hold.epochs for hold in self.holds if hold.cause is Cause.REVOKE)
            self._named = (epochs, frozenset().union(*epochs), frozenset().union(*revoked))
        return self._named[1:]

    def revoke(self, event: events.RevokeRequested, now: float) -> _Commands:
        """Begin the hold of a revoke."""
        yield commands.Note(
            f"Kafka revokes {names_of(event.partitions)}",
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
            self._partitions[owned.partition] = asked_back._replace(
                held_since=held_since, runs_are_known=not asked_back.entries
            )
            epochs[owned.partition] = owned.epoch
        self.holds = (*self.holds, Hold(cause, epochs, now, budget))

    def lose(self, event: events.PartitionsLost, now: float) -> _Commands:
        """Drop lost partitions at once, even if they wait for runs."""
        is_superseded = event.reason is events.LostReason.SUPERSEDED
        change = Change.SUPERSESSION_NOTICED if is_superseded else Change.LOSS_NOTICED
        outcome = HoldOutcome.SUPERSEDED if is_superseded else HoldOutcome.LOST
        lost = [owned.changed(change) for owned in self._partitions.known(event.partitions)]
        for owned in lost:
            del self._partitions[owned.partition]
        yield commands.Note(
            f"{outcome.value}: {names_of(event.partitions)}; no further commits for them",
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
        """Record a commit in the hold of its partition, if there is one.

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
        holds, version, until = self._advanced
        if holds is self.holds and version == self._partitions.version and now < until:
            return
        advanced = []
        for hold in self.holds:
            step = advance(hold, self._unfinished(hold), self._settings, now)
            advanced.append(step.hold)
            self._partitions.update({owned.partition: owned for owned in step.drained})
            yield from step.cancels
        self.holds = tuple(advanced)
        for hold in sorted(self.holds, key=lambda hold: hold.cause is Cause.LEAVE):
            if is_over(self._unfinished(hold)):
                yield from self._end(hold, self._partitions.known(hold.epochs), now)
            elif not hold.is_shown and now - hold.requested_at >= _SHOWN_AFTER_S:
                yield self._show(hold, self._unfinished(hold), now)
        self._advanced = (self.holds, self._partitions.version, self._next_due(now))

    def _unfinished(self, hold: Hold) -> list[OwnedPartition]:
        """The partitions of a hold that drain or have claims; the others have drained."""
        unfinished = self._partitions.of(Role.DRAINING, Role.CLAIMED)
        return [owned for owned in unfinished if owned.partition in hold.epochs]

    def _next_due(self, now: float) -> float:
        """When a step may differ from this one although no partition has changed."""
        times = (at - ROUNDING_S for hold in self.holds for at in hold.due_times(self._settings))
        return min((at for at in times if at > now - 2 * ROUNDING_S), default=float("inf"))

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
