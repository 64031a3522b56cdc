"""The member table of a group: its members, their partitions, open holds and last receipts.

The table is derived from the records of the members. A member that was killed leaves no record: its
partitions move when another member records their assignment.
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
    """The kind of a record."""

    JOINED = "joined"
    ASSIGNED = "assigned"
    """Partitions were added to the assignment."""
    HOLDING = "holding"
    """A hold began and is not over."""
    HOLD = "hold"
    """The receipt of a hold: its partitions are given up."""
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A record of a member about itself.

    Attributes:
        member: The process of the member.
        name: The display name of the member.
        at: When it was recorded, in seconds since 1970.
        run_ids: The runs of a hold.
        outcome: The outcome of a hold; empty for other records.
        run_id: The streaming run of the member; empty if there is none.
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
    """A member that has not left: its first record, its partitions and its open holds."""

    first: MemberRecord
    owns: set[TopicPartition] = field(default_factory=set)
    holds: list[tuple[MemberRecord, set[TopicPartition]]] = field(default_factory=list)

    def remove(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove partitions that the member no longer owns."""
        gone = set(partitions)
        self.owns -= gone
        self.holds = [(record, left - gone) for record, left in self.holds if left - gone]


@dataclass(frozen=True, slots=True)
class MemberTable:
    """The members of a group by name, and the last receipts, newest first."""

    members: tuple[Member, ...]
    receipts: tuple[MemberRecord, ...]

    @property
    def holds(self) -> tuple[tuple[MemberRecord, frozenset[TopicPartition]], ...]:
        """The open holds, oldest first, with the partitions left of each."""
        found = [(record, frozenset(left)) for m in self.members for record, left in m.holds]
        return tuple(sorted(found, key=lambda hold: hold[0].at))


def member_table(history: Iterable[MemberRecord]) -> MemberTable:
    """Derive the member table from the records of all members, oldest first."""
    members: dict[str, Member] = {}
    receipts: list[MemberRecord] = []
    for record in history:
        if record.kind is Kind.LEFT:
            members.pop(record.member, None)
            continue
        member = members.setdefault(record.member, Member(record))
        if record.kind is Kind.ASSIGNED:
            for other in [other for other in members.values() if other is not member]:
                had_partitions = bool(other.owns)
                other.remove(record.partitions)
                if had_partitions and not other.owns:  # its process was killed
                    del members[other.first.member]
            member.owns.update(record.partitions)
        elif record.kind is Kind.HOLDING:
            member.holds.append((record, set(record.partitions)))
        elif record.kind is Kind.HOLD:
            member.remove(record.partitions)
            receipts.append(record)
    ordered = sorted(members.values(), key=lambda member: (member.first.name, member.first.at))
    return MemberTable(tuple(ordered), tuple(reversed(receipts[-_RECEIPTS_KEPT:])))
