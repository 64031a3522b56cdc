"""Receipts: how a hold ended, as a value for checks and as a sentence for people."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.offsets import named

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import TopicPartition


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
    """All live runs ended by themselves, and what succeeded is committed."""
    HANDED_OVER = "handed over"
    """The member left for its successor: what was done is committed, live runs go on, and the
    successor adopts them."""
    DEADLINE = "deadline"
    """Time was up, or the work was interrupted: released with claims in place, which the next owner
    takes over."""
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
        text = self._sentence
        if self.run_ids:
            what = "still working" if self.outcome is Outcome.HANDED_OVER else "waited for"
            text += f", {len(self.run_ids)} run{'s' * (len(self.run_ids) != 1)} {what}"
        if self.cancelled:
            text += f", {len(self.cancelled)} cancelled"
        if self.handed_over:
            is_one = len(self.handed_over) == 1
            claims = "unfinished claim on" if is_one else "unfinished claims on"
            goes = "goes" if is_one else "go"
            text += f"; {claims} {named(self.handed_over)} {goes} to the next owner"
        return text

    @property
    def _sentence(self) -> str:
        what, after = named(self.partitions), f"after {self.seconds:.1f} s"
        verb = "left" if self.cause is Cause.LEAVE else "released"
        return {
            Outcome.NOTHING_TO_DO: f"{verb} {what} {'at once' if self.seconds < 1 else after}",
            Outcome.DRAINED: f"drained and {verb} {what} {after}",
            Outcome.HANDED_OVER: f"handed {what} over to the successor {after}",
            Outcome.DEADLINE: f"gave {what} up {after}, before the work had ended",
            Outcome.SUPERSEDED: f"lost {what} to another member {after}",
            Outcome.LOST: f"lost {what} {after}",
        }[self.outcome]
