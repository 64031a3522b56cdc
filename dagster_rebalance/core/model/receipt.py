"""Receipts: how a hold ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.offsets import names_of

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import TopicPartition


class Cause(enum.Enum):
    """Why partitions are held."""

    REVOKE = "revoke"
    """Kafka requested the revoke."""
    LEAVE = "leave"
    """The member leaves the group: shutdown, a reload, or a sensor without ticks."""


class HoldOutcome(enum.Enum):
    """How a hold ended."""

    NOTHING_TO_DO = "nothing to do"
    """No run worked on the partitions."""
    DRAINED = "drained"
    """All live runs ended, and their successes are committed."""
    HANDED_OVER = "handed over"
    """The member left for its successor: finished work is committed, and the successor adopts live
    runs."""
    DEADLINE = "deadline"
    """The deadline passed, or the work was interrupted. The next owner takes over the claims."""
    SUPERSEDED = "superseded"
    """Another rebalance overtook the hold."""
    LOST = "lost"
    """The member was fenced, or its session expired."""

    @property
    def is_drained(self) -> bool:
        """Whether no run worked on the partitions any more, or the successor adopted it."""
        return self not in {HoldOutcome.DEADLINE, HoldOutcome.SUPERSEDED, HoldOutcome.LOST}


@dataclass(frozen=True, slots=True)
class Receipt:
    """How a hold ended.

    Attributes:
        seconds: From the request to the end.
        committed: The offsets committed during the hold.
        run_ids: The runs that the hold waited for, or left to the successor.
        handed_over: Partitions released with claims.
    """

    outcome: HoldOutcome
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
            what = "still working" if self.outcome is HoldOutcome.HANDED_OVER else "waited for"
            text += f", {len(self.run_ids)} run{'s' * (len(self.run_ids) != 1)} {what}"
        if self.cancelled:
            text += f", {len(self.cancelled)} cancelled"
        if self.handed_over:
            is_one = len(self.handed_over) == 1
            claims = "unfinished claim on" if is_one else "unfinished claims on"
            goes = "goes" if is_one else "go"
            text += f"; {claims} {names_of(self.handed_over)} {goes} to the next owner"
        return text

    @property
    def _sentence(self) -> str:
        what, after = names_of(self.partitions), f"after {self.seconds:.1f} s"
        verb = "left" if self.cause is Cause.LEAVE else "released"
        return {
            HoldOutcome.NOTHING_TO_DO: f"{verb} {what} {'at once' if self.seconds < 1 else after}",
            HoldOutcome.DRAINED: f"drained and {verb} {what} {after}",
            HoldOutcome.HANDED_OVER: f"handed {what} over to the successor {after}",
            HoldOutcome.DEADLINE: f"gave {what} up {after}, before the work had ended",
            HoldOutcome.SUPERSEDED: f"lost {what} to another member {after}",
            HoldOutcome.LOST: f"lost {what} {after}",
        }[self.outcome]
