"""Holds: partitions that have to be given up, from the request to the release.

Theory of operation. In KIP-983's terms, a hold is a delayed revoke. Kafka requests a revoke, or the
member leaves the group. `Hold` names the partitions, each with its epoch, and the time that this
may take. They stay assigned: what succeeds on them is committed. From then on each call of the
engine makes one step, `advance`:

1. Cancel. Runs that have not started are cancelled at once. At the deadline, which leaves a slice
   of the limit for the last commits, the others are cancelled as well, or left at work
   (`on_deadline`).
2. Drained? `waits_of` lists what a partition waits for: live runs, a look at its runs since the
   request, commits. With nothing on the list it is drained. The same list is what people read.
3. Too late? At the limit a partition goes whatever it waits for, and its claims stay: the next
   owner takes the work over. Where runs are left at work, it goes as soon as it waits for nothing
   else.

When all its partitions are drained, the hold is over (`is_over`). The engine writes the receipt and
forgets partitions and hold. The shell delays what the engine holds, and nothing else: so the next
poll of the consumer completes the revoke. One hold is one release, since Kafka takes the answer to
a request as a whole.

A leave is a hold of all partitions, at whose end the member closes. A partition may be in the hold
of a revoke and in that of a leave. A loss ends a hold, or its part of it, at any step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.batches.settings import DeadlinePolicy
from dagster_rebalance.core.model.commands import CancelRuns
from dagster_rebalance.core.model.offsets import OffsetRange, named
from dagster_rebalance.core.model.receipt import Cause, Outcome, Receipt
from dagster_rebalance.core.model.run import named_runs
from dagster_rebalance.core.partitions.state_machine import Change, Phase
from dagster_rebalance.core.runs.progress import InFlight, ToRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dagster_rebalance.core.batches.settings import EngineSettings, HoldBudget
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.partitions.owned import OwnedPartition


@dataclass(frozen=True, slots=True)
class Hold:
    """Partitions that have to be given up together.

    Attributes:
        cause: Whether Kafka asked for them, or the member leaves.
        epochs: The partitions, each with the epoch in which it is held.
        requested_at: When, on the caller's clock.
        budget: How long it may take.
        run_ids: Every run that was waited for.
        cancelled: The runs that were cancelled for it.
        cancelled_at: When runs were last cancelled.
        committed: The offsets committed meanwhile, by partition.
        is_past_deadline: Whether runs were still live at the deadline, so that its policy was
            applied.
        hands_over: Whether live runs are left to the successor: only commits are waited for.
        is_shown: Whether people were told of it: one that is over at once has its receipt only.
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
    is_shown: bool = False

    @property
    def deadline_at(self) -> float:
        """When waiting ends and the deadline policy is applied."""
        return self.limit_at - self.budget.commit_slice_s

    @property
    def limit_at(self) -> float:
        """When the partitions are released whatever happens."""
        return self.requested_at + self.budget.limit_s

    def hastened(self, budget: HoldBudget, now: float, *, hands_over: bool) -> Hold:
        """Return the hold with the time limit of another request, if that limit is earlier.

        A deploy in the middle of a slow leave makes such a request, for example.
        """
        hold = replace(self, hands_over=self.hands_over or hands_over)
        if now + budget.limit_s >= self.limit_at:
            return hold
        return replace(
            hold, budget=replace(budget, limit_s=now - self.requested_at + budget.limit_s)
        )

    def split(self, partitions: Collection[TopicPartition]) -> tuple[Hold, Hold]:
        """The part of the hold that concerns these partitions, and the rest."""
        part = {
            partition: epoch for partition, epoch in self.epochs.items() if partition in partitions
        }
        rest = {
            partition: epoch for partition, epoch in self.epochs.items() if partition not in part
        }
        committed = {
            partition: offset for partition, offset in self.committed.items() if partition in part
        }
        return replace(self, epochs=part, committed=committed), replace(self, epochs=rest)

    @property
    def outcome(self) -> Outcome:
        """How the hold ends if it is released now."""
        if self.is_past_deadline:
            return Outcome.HANDED_OVER if self.hands_over else Outcome.DEADLINE
        return Outcome.DRAINED if self.run_ids or self.committed else Outcome.NOTHING_TO_DO

    def _outcome(self, held: Iterable[OwnedPartition]) -> Outcome:
        """The outcome, given what is left: another hold may have had its work interrupted."""
        interrupted = (
            entry.progress.trouble.run_id
            for owned in held
            for entry in owned.entries
            if isinstance(entry.progress, ToRequest)
            and entry.progress.trouble is not None
            and entry.progress.interruptions
        )
        is_drained = self.outcome is Outcome.DRAINED
        return Outcome.DEADLINE if is_drained and self.run_ids & {*interrupted} else self.outcome

    def receipt(
        self, held: Iterable[OwnedPartition], now: float, outcome: Outcome | None = None
    ) -> Receipt:
        """Return the receipt of the hold if it ends now.

        `outcome` is for a hold that ends in another way than by a release.
        """
        held = tuple(held)
        return Receipt(
            outcome=outcome or self._outcome(held),
            cause=self.cause,
            partitions=tuple(sorted(self.epochs)),
            seconds=now - self.requested_at,
            committed=dict(self.committed),
            run_ids=tuple(sorted(self.run_ids)),
            cancelled=tuple(sorted(self.cancelled)),
            handed_over=tuple(
                sorted(
                    owned.partition
                    for owned in held
                    if owned.entries and owned.partition in self.epochs
                )
            ),
        )


class Wait(NamedTuple):
    """One thing that a draining partition waits for.

    Attributes:
        where: The range, or the whole partition.
        run_ids: Live runs that may work on it.
        answer: The answer that is missing; empty for a wait for runs.
    """

    where: OffsetRange | TopicPartition
    run_ids: tuple[str, ...] = ()
    answer: str = ""

    @property
    def subject(self) -> str:
        """What is waited for, without the place."""
        return self.answer or f"{named_runs(self.run_ids)} on"


_RUNS_TO_LOOK_UP = "Dagster to say which runs work on"
_COMMIT_TO_CONFIRM = "Kafka to confirm the commit of"
_COMMIT_TO_RECORD = "Dagster to record the commit of"
_MOST_WAITS = 10
"""A tick stores the list, and a hold may have 1,000 partitions."""


def named_waits(waits: Iterable[Wait]) -> str:
    """List waits for people: equal ones once, and the first ones only."""
    places: dict[str, list[OffsetRange | TopicPartition]] = {}
    for wait in waits:
        places.setdefault(wait.subject, []).append(wait.where)
    shown = [
        f"{subject} {_named_places(places[subject])}" for subject in islice(places, _MOST_WAITS)
    ]
    more = len(places) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _named_places(places: Sequence[OffsetRange | TopicPartition]) -> str:
    """Name one range in full, and several by their partitions."""
    if len(places) == 1:
        return str(places[0])
    return named({p.topic_partition if isinstance(p, OffsetRange) else p for p in places})


def waits_of(owned: OwnedPartition, *, hands_over: bool = False) -> tuple[Wait, ...]:
    """Return what a draining partition waits for.

    A commit that Kafka refuses is not waited for: the claim stays for the next owner.
    A partition that leaves its runs to others (`hands_over`) waits for none of them.
    """
    waits: list[Wait] = []
    if not hands_over:
        waits += [
            Wait(e.range, e.progress.run_ids)
            for e in owned.entries
            if isinstance(e.progress, InFlight)
        ]
    if not owned.runs_are_known:
        waits.append(Wait(owned.partition, answer=_RUNS_TO_LOOK_UP))
    committing = owned.committing
    is_refused = owned.pending is not None and bool(owned.pending.refused)
    if committing is not None and not is_refused:
        waits.append(Wait(committing.range, answer=_COMMIT_TO_CONFIRM))
    if owned.unrecorded is not None:
        waits.append(Wait(owned.unrecorded.range, answer=_COMMIT_TO_RECORD))
    return tuple(waits)


class Step(NamedTuple):
    """What a step of a hold comes to.

    Attributes:
        hold: The hold after it.
        drained: The partitions that need not be held any longer.
        cancels: The runs to be cancelled.
    """

    hold: Hold
    drained: tuple[OwnedPartition, ...]
    cancels: tuple[CancelRuns, ...]


def advance(
    hold: Hold, held: Collection[OwnedPartition], settings: EngineSettings, now: float
) -> Step:
    """Make one step: cancel, and find what is drained and what is too late.

    `held` is the state of the hold's partitions.
    """
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
    drained, is_overdue = [], False
    for owned in held:
        if owned.phase is not Phase.DRAINING:
            continue
        if not waits_of(owned):
            drained.append(owned.changed(Change.DRAIN_FINISHED))
        elif now >= hold.limit_at or (
            is_late and not cancels_all and not waits_of(owned, hands_over=True)
        ):
            drained.append(owned.changed(Change.DEADLINE_PASSED))
            is_overdue = True
    is_past_deadline = hold.is_past_deadline or is_overdue or (cancels_all and bool(live))
    return Step(replace(hold, is_past_deadline=is_past_deadline), tuple(drained), cancels)


def is_over(held: Iterable[OwnedPartition]) -> bool:
    """Whether the hold of these partitions has ended."""
    return all(owned.phase is Phase.DRAINED for owned in held)


def _cancel(
    hold: Hold, held: Collection[OwnedPartition], retry_s: float, now: float, *, cancels_all: bool
) -> tuple[Hold, tuple[CancelRuns, ...]]:
    """What was asked for is asked for again after a while, should it not have worked."""
    if cancels_all:
        unwanted = _union(owned.live_runs for owned in held)
    else:
        # A run that turned out to have started was left alone.
        hold = replace(
            hold, cancelled=hold.cancelled - _union(owned.started_runs for owned in held)
        )
        unwanted = (
            frozenset() if hold.hands_over else _union(owned.unstarted_runs for owned in held)
        )
    is_due_again = hold.cancelled_at is not None and now - hold.cancelled_at >= retry_s
    due = unwanted if is_due_again else unwanted - hold.cancelled
    if not due:
        return hold, ()
    why = "the drain deadline has passed" if cancels_all else "they have not started"
    reason = f"{named(hold.epochs)} must be given up, and {why}"
    cancel = CancelRuns(
        tuple(sorted(due)), reason, only_unstarted=not cancels_all, is_again=due <= hold.cancelled
    )
    return replace(hold, cancelled=hold.cancelled | due, cancelled_at=now), (cancel,)


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)
