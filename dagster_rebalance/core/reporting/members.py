"""The roster of a group: who owns what, which holds are open, and how the last ones ended.

It is read from what the members have said of themselves. No member knows the others, and one that
was killed says nothing: its partitions leave the roster when another member says that it has them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.model.offsets import TopicPartition

_RECEIPTS_KEPT = 10


class Kind(enum.Enum):
    """What a member says."""

    JOINED = "joined"
    ASSIGNED = "assigned"
    """Partitions were added to what it owns."""
    HOLDING = "holding"
    """Partitions have to be given up, and something still works on them."""
    HOLD = "hold"
    """The receipt of a hold: they are not its own any more."""
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Said:
    """One thing that a member has said.

    Attributes:
        kind: What it is.
        member: The process of the member.
        name: Its name for people.
        at: When, in seconds since 1970.
        partitions: What it is about.
        text: As a sentence.
        run_ids: The runs that a hold waits for, or has waited for.
        outcome: How a hold ended; empty for everything else.
        run_id: The streaming run that the member lives in; empty where it lives in none.
    """

    kind: Kind
    member: str
    name: str
    at: float
    partitions: tuple[TopicPartition, ...] = ()
    text: str = ""
    run_ids: tuple[str, ...] = ()
    outcome: str = ""
    run_id: str = ""


@dataclass(slots=True)
class Member:
    """A member that has not said that it left.

    Attributes:
        said: The first thing that is known of it.
        owns: What it owns.
        holds: What it still has to give up: what it said when each hold began, with the partitions
            that are left of it.
    """

    said: Said
    owns: set[TopicPartition] = field(default_factory=set)
    holds: list[tuple[Said, set[TopicPartition]]] = field(default_factory=list)

    def gave_up(self, partitions: Iterable[TopicPartition]) -> None:
        """It has these no more, whatever became of them."""
        gone = set(partitions)
        self.owns -= gone
        self.holds = [(said, left - gone) for said, left in self.holds if left - gone]


@dataclass(frozen=True, slots=True)
class MemberTable:
    """The state of a group, as its members tell it.

    Attributes:
        members: Those that are there, by name.
        receipts: How the last holds ended, newest first.
    """

    members: tuple[Member, ...]
    receipts: tuple[Said, ...]

    @property
    def holds(self) -> tuple[tuple[Said, frozenset[TopicPartition]], ...]:
        """The open holds, the oldest first, with what is left of each."""
        found = [(said, frozenset(left)) for member in self.members for said, left in member.holds]
        return tuple(sorted(found, key=lambda hold: hold[0].at))


def roster(history: Iterable[Said]) -> MemberTable:
    """What the history of a group comes to.

    Args:
        history: What its members have said, oldest first.
    """
    members: dict[str, Member] = {}
    receipts: list[Said] = []
    for said in history:
        if said.kind is Kind.LEFT:
            members.pop(said.member, None)
            continue
        member = members.setdefault(said.member, Member(said))
        if said.kind is Kind.ASSIGNED:
            for other in [other for other in members.values() if other is not member]:
                had = bool(other.owns)
                other.gave_up(said.partitions)
                if had and not other.owns:  # it did not say so itself: its process is gone
                    del members[other.said.member]
            member.owns.update(said.partitions)
        elif said.kind is Kind.HOLDING:
            member.holds.append((said, set(said.partitions)))
        elif said.kind is Kind.HOLD:
            member.gave_up(said.partitions)
            receipts.append(said)
    there = sorted(members.values(), key=lambda member: (member.said.name, member.said.at))
    return MemberTable(tuple(there), tuple(reversed(receipts[-_RECEIPTS_KEPT:])))
