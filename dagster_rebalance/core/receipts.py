"""Receipts: how a hold ended, as a value for checks and as a sentence for people."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.partition import named

if TYPE_CHECKING:
    from dagster_rebalance.core.partition import TopicPartition


class Cause(enum.Enum):
    """Why partitions are held."""

    REVOKE = "revoke"
    """Kafka requested the revoke."""
    LEAVE = "leave"
    """The member leaves the group: shutdown, a reload, or a sensor that no longer ticks."""


class Outcome(enum.Enum):
    """How a hold ended."""

    NOTHING_TO_DO = "nothing to do"
    """No run was working on the partitions: released at once."""
    DRAINED = "drained"
    """All live runs ended, and what succeeded is committed."""
    HANDED_OVER = "handed over"
    """The member left for its successor: what was done is committed, live runs go on, and the
    successor adopts them."""
    DEADLINE = "deadline"
    """Time was up: released with claims in place, which the next owner takes over."""
    SUPERSEDED = "superseded"
    """Another rebalance overtook the hold."""
    LOST = "lost"
    """The member was fenced, or its session ended."""

    @property
    def is_drained(self) -> bool:
        """Whether nothing was at work on the partitions any more, or its successor had it in hand.

        What a successor adopts was meant to go on.
        """
        return self not in {Outcome.DEADLINE, Outcome.SUPERSEDED, Outcome.LOST}


@dataclass(frozen=True, slots=True)
class Receipt:
    """How a hold ended.

    Attributes:
        outcome: How it ended.
        cause: Why the partitions were held.
        partitions: What was held.
        seconds: From the request to the end.
        committed: The offsets committed meanwhile, by partition.
        run_ids: The runs that were waited for, or left at work for the successor.
        cancelled: The runs that were cancelled.
        handed_over: Partitions that were released with claims in place.
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
        text = (
            f"{self.cause.value} of {named(self.partitions)} {_VERB[self.outcome]} after "
            f"{self.seconds:.1f} s"
        )
        if self.run_ids:
            what = "left at work" if self.outcome is Outcome.HANDED_OVER else "waited for"
            text += f", {len(self.run_ids)} run{'s' * (len(self.run_ids) != 1)} {what}"
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
