"""Holds: a revoke that was requested and is not released yet, its time budget, and the receipt that says how it ended.

One hold is one atomic release: the partitions of a revoke are drained one by one, and given to their next owners together.
A member that leaves the group on its own account holds all its partitions in the same way.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.partition import TopicPartition


class Outcome(enum.Enum):
    """How a hold ended."""

    NOTHING_TO_DO = "nothing to do"
    """No run was working on the partitions: released at once."""
    DRAINED = "drained"
    """All live runs ended, and what succeeded is committed."""
    HANDED_OVER = "handed over"
    """The member left for its successor: what was done is committed, live runs go on, and the successor adopts them."""
    DEADLINE = "deadline"
    """Time was up: released with claims in place, which the next owner takes over."""
    SUPERSEDED = "superseded"
    """Another rebalance overtook the hold."""
    LOST = "lost"
    """The member was fenced, or its session ended."""


class Cause(enum.Enum):
    """Why partitions are held."""

    REVOKE = "revoke"
    """Kafka requested the revoke."""
    LEAVE = "leave"
    """The member leaves the group: shutdown, a reload, or a sensor that no longer ticks."""


class DeadlinePolicy(enum.Enum):
    """What happens to runs that are still live at the deadline of a hold."""

    CANCEL = "cancel"
    """They are cancelled; the release waits, within the limit, until Dagster shows them ended."""
    RELEASE = "release"
    """They go on, and the next owner adopts them through their claims."""


class LeavePolicy(enum.Enum):
    """How a member leaves for its successor: a newer process of its code location, found through the same Dagster instance."""

    RELEASE = "release"
    """It commits what is done and leaves at once; the successor adopts the live runs."""
    DRAIN = "drain"
    """It waits for its live runs, as for a revoke."""


@dataclass(frozen=True, slots=True)
class HoldBudget:
    """The time that a hold may take.

    Attributes:
        limit_s: Seconds from the request to the release, at most. Kafka's limit (`max.poll.interval.ms`) must be longer.
        commit_slice_s: The part of it, at its end, that is kept for cancelling runs and for the last commit.

    Raises:
        ConfigurationError: The slice leaves no time to drain.
    """

    limit_s: float = 300.0
    commit_slice_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.commit_slice_s < self.limit_s:
            msg = (
                f"hold_commit_slice_s={self.commit_slice_s:g} must be above 0 and below hold_limit_s={self.limit_s:g}: "
                "it is the last part of the hold, kept for the final commit"
            )
            raise ConfigurationError(msg)


@dataclass(frozen=True, slots=True)
class Hold:
    """Partitions that have to be given up together.

    Attributes:
        cause: Why.
        epochs: The partitions, each with the epoch in which it is held.
        requested_at: When, on the caller's clock.
        budget: How long it may take.
        run_ids: Every run that was waited for.
        cancelled: The runs that were cancelled for it.
        cancelled_at: When runs were last cancelled.
        committed: The offsets committed meanwhile, by partition.
        is_past_deadline: Whether runs were still live at the deadline, so that its policy was applied.
        hands_over: Whether live runs are left to the successor: only commits are waited for.
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

    def hastened(self, budget: HoldBudget, now: float, *, hands_over: bool) -> Hold:
        """The hold with the time of another request if that ends earlier: a deploy in the middle of a slow leave, say."""
        if now + budget.limit_s >= self.limit_at:
            return replace(self, hands_over=self.hands_over or hands_over)
        shorter = replace(budget, limit_s=now - self.requested_at + budget.limit_s)
        return replace(self, budget=shorter, hands_over=self.hands_over or hands_over)

    @property
    def deadline_at(self) -> float:
        """When waiting ends and the deadline policy is applied."""
        return self.requested_at + self.budget.limit_s - self.budget.commit_slice_s

    @property
    def limit_at(self) -> float:
        """When the partitions are released whatever happens."""
        return self.requested_at + self.budget.limit_s

    @property
    def outcome(self) -> Outcome:
        """How the hold ends if it is released now."""
        if self.is_past_deadline:
            return Outcome.HANDED_OVER if self.hands_over else Outcome.DEADLINE
        if self.run_ids or self.committed:
            return Outcome.DRAINED
        return Outcome.NOTHING_TO_DO


@dataclass(frozen=True, slots=True)
class Receipt:
    """How a hold ended, for people and for checks.

    Attributes:
        outcome: How it ended.
        cause: Why the partitions were held.
        partitions: What was held.
        seconds: From the request to the end.
        committed: The offsets committed meanwhile, by partition.
        run_ids: The runs that were waited for, or left at work for the successor.
        cancelled: The runs that were cancelled.
        handed_over: Partitions that were given up with claims in place.
    """

    outcome: Outcome
    cause: Cause
    partitions: tuple[TopicPartition, ...]
    seconds: float
    committed: dict[TopicPartition, int]
    run_ids: tuple[str, ...]
    cancelled: tuple[str, ...]
    handed_over: tuple[TopicPartition, ...]

    def __str__(self) -> str:
        text = f"{self.cause.value} of {named(self.partitions)} {_VERB[self.outcome]} after {self.seconds:.1f} s"
        if self.run_ids:
            went_on = self.outcome is Outcome.HANDED_OVER
            text += f", {len(self.run_ids)} run{'s' * (len(self.run_ids) != 1)} {'left at work' if went_on else 'waited for'}"
        if self.cancelled:
            text += f", {len(self.cancelled)} cancelled"
        if self.handed_over:
            text += f", claims of {named(self.handed_over)} left to the next owner"
        return text


_VERB = {
    Outcome.NOTHING_TO_DO: "released with nothing to do",
    Outcome.DRAINED: "drained and released",
    Outcome.HANDED_OVER: "handed over to the successor",
    Outcome.DEADLINE: "released at the deadline",
    Outcome.SUPERSEDED: "superseded",
    Outcome.LOST: "lost",
}


def receipt_of(hold: Hold, *, now: float, outcome: Outcome | None = None, handed_over: frozenset[TopicPartition] = frozenset()) -> Receipt:
    """Write the receipt of a hold that ends now."""
    return Receipt(
        outcome=outcome or hold.outcome,
        cause=hold.cause,
        partitions=tuple(sorted(hold.epochs)),
        seconds=now - hold.requested_at,
        committed=dict(hold.committed),
        run_ids=tuple(sorted(hold.run_ids)),
        cancelled=tuple(sorted(hold.cancelled)),
        handed_over=tuple(sorted(handed_over)),
    )


def named(partitions: Iterable[TopicPartition]) -> str:
    """Partitions as a person would write them: `orders-0, orders-1`."""
    return ", ".join(str(partition) for partition in sorted(partitions)) or "no partitions"
