"""Group status: the partitions of a group, as a client outside the group sees them.

Each row combines the members in Kafka with an `OwnedPartition`, in the state that the next owner of
the partition would have. Messages come from `explain`, so commands and members report the same.

The member table shows the members, their partitions, open holds and last receipts, derived from
the records of the members. A killed member records nothing more: its partitions move when another
member records their assignment.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_rebalance.core.partitions.unrecorded import NOTHING
from dagster_rebalance.core.reporting.explain import explain_partition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.model.events import PartitionLookup
    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
    from dagster_rebalance.core.partitions.owned import OwnedPartition


_SILENT_S = 90.0
"""A sensor ticks every few seconds, and a tick may take a minute."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a group, as Kafka shows it.

    Attributes:
        address: The client id and host of the member.
        owns: Its assignment. During a hold, Kafka omits the partitions to be revoked.
        is_to_own: Its target assignment; empty if Kafka does not report one.
    """

    member_id: str
    address: str
    owns: frozenset[TopicPartition]
    is_to_own: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True, slots=True)
class RecordedAssignment:
    """An assignment that a member has recorded in Dagster.

    Attributes:
        name: The code location, or the streaming run.
        run_id: The streaming run of the member; any other text if there is none.
        is_run: Whether the member is a streaming run.
    """

    member_id: str
    name: str
    run_id: str
    partitions: frozenset[TopicPartition]
    is_run: bool = False


@dataclass(frozen=True, slots=True)
class Owners:
    """The owners of partitions: members in Kafka, and recorded assignments (newest first)."""

    members: tuple[GroupMember, ...]
    assigned: tuple[RecordedAssignment, ...] = ()

    def name(self, member: GroupMember) -> str:
        """Return the code location or streaming run of a member, or its address if unknown."""
        known = (one.name for one in self.assigned if one.member_id == member.member_id)
        return next(known, member.address)

    def owner(self, partition: TopicPartition) -> str:
        """Return the name of the owner; empty if there is none."""
        return next((self.name(m) for m in self.members if partition in m.owns), "")

    def owned_by(self, run_id: str) -> frozenset[TopicPartition]:
        """Return the partitions of a streaming run."""
        ids = {one.member_id for one in self.assigned if one.run_id == run_id}
        return frozenset(p for m in self.members if m.member_id in ids for p in m.owns)

    def streams(self, partition: TopicPartition) -> bool:
        """Whether a streaming run owns a partition."""
        runs = {one.member_id for one in self.assigned if one.is_run}
        return any(m.member_id in runs for m in self.members if partition in m.owns)

    def hold(self, partition: TopicPartition) -> str:
        """Describe which member holds a partition to be revoked, and which member waits for it.

        The text is empty if the owner keeps the partition, or the group has no members.
        """
        owners = [m for m in self.members if partition in m.owns]
        heirs = [m for m in self.members if partition in m.is_to_own and m not in owners]
        to = f"{self.name(heirs[0])} waits for it" if heirs else ""
        if owners or not self.members:
            return to
        ids = {member.member_id for member in self.members} - {m.member_id for m in heirs}
        last = next((one for one in self.assigned if partition in one.partitions), None)
        holder = f"held by {last.name}" if last is not None and last.member_id in ids else ""
        return ", ".join(filter(None, (holder, to))) or "no member owns it"


@dataclass(frozen=True, slots=True)
class SensorState:
    """A sensor that runs members of a group, as Dagster shows it.

    Attributes:
        silent_for_s: The time since its last tick began; None if there is no tick.
        error: The error of its last tick.
    """

    name: str
    is_on: bool
    silent_for_s: float | None = None
    error: str = ""

    @property
    def why_no_member(self) -> str:
        """Why the sensor has no member in the group, and what to do."""
        if not self.is_on:
            return f"Sensor {self.name} is off: turn it on"
        on = f"Sensor {self.name} is on, "
        if self.silent_for_s is None or self.silent_for_s >= _SILENT_S:
            since = "has no tick"
            if self.silent_for_s is not None:
                since = f"has had no tick for {self.silent_for_s:.0f} s"
            why = f", and the last one failed: {self.error}" if self.error else ""
            return (
                f"{on}and {since}{why}. Its code location does not load or does not answer in "
                "time, or Dagster's daemon is not running: see the page Deployment in Dagster"
            )
        if self.error:
            return f"{on}and its last tick failed {self.silent_for_s:.0f} s ago: {self.error}"
        return (
            f"{on}and its last tick was {self.silent_for_s:.0f} s ago. Read that tick: the member "
            "is about to join, its runs wait in Dagster's queue, or the tick names the problem"
        )


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition of a group. `committed`, `end` and `lag` are None if unknown.

    Attributes:
        claims: The claimed ranges, each with its batch.
        runs: The runs that may work on the partition.
        hold: The members that hold the partition or wait for it; empty if its owner keeps it.
        stopped: Why the partition is stopped; empty if it is not.
        paused: The directive of an operator.
        sentence: Why the partition does or does not make progress.
    """

    partition: TopicPartition
    owner: str
    committed: int | None
    claims: tuple[tuple[OffsetRange, str], ...]
    end: int | None
    lag: int | None
    runs: tuple[str, ...]
    hold: str
    stopped: str
    paused: str
    sentence: str


def status_of(
    owned: OwnedPartition, found: PartitionLookup | None, owners: Owners, now: float
) -> PartitionStatus:
    """Return the status of a partition in the state that its next owner would have.

    `found` is None while the leader does not verify the committed offset.
    """
    stored = None if found is None else found.stored
    committed = None if stored is None else stored.offset
    end, lag = None, None
    if found is not None and found.bounds.is_known:
        end = found.bounds.until
        begins = owned.ledger.next_offset if owned.ledger else committed
        lag = None if begins is None else max(0, end - max(begins, found.bounds.start))
    # Only the owner has pending writes, and knows since when records wait.
    sentence = explain_partition(
        owned._replace(pending=None, unrecorded=NOTHING, backlog_since=None),
        now,
        streams=owners.streams(owned.partition),
        has_members=bool(owners.members),
        is_outside=True,
    )
    if lag and not (owners.members or owned.entries or owned.stop_reason or owned.directive):
        sentence = f"{owned.partition}: {lag} offsets wait for a member"
    return PartitionStatus(
        partition=owned.partition,
        owner=owners.owner(owned.partition),
        committed=committed,
        claims=tuple((entry.range, entry.batch_id) for entry in owned.entries),
        end=end,
        lag=lag,
        runs=tuple(sorted({*owned.live_runs, *owned.blocked_by})),
        hold=owners.hold(owned.partition),
        stopped=owned.stop_reason,
        paused="" if owned.directive is None else str(owned.directive),
        sentence=sentence,
    )


def why_no_member(sensors: Iterable[SensorState]) -> tuple[str, ...]:
    """Return why a group has no member, and what to do, from its sensors."""
    unknown = (
        "Turn its sensor on. If it is on, check its last tick and whether its code location loads"
    )
    reasons = [sensor.why_no_member for sensor in sensors] or [unknown]
    return ("The group has no member, so no new batch starts", *reasons)


def explanation(status: PartitionStatus, *, has_members: bool) -> tuple[str, ...]:
    """Explain a partition in sentences: its state, its owner, and what to do."""
    sentences = [status.sentence]
    if has_members and status.owner:
        hold = f"; {status.hold}" if status.hold else ""
        sentences.append(f"Its owner is {status.owner}{hold}")
    elif has_members:
        sentences.append(
            f"It has no owner at the moment: {status.hold}. The holder waits for the runs on the "
            "partition for at most hold_limit_s; cancel these runs to end the wait"
        )
    if status.end is None:
        sentences.append("Its leader does not answer: check the brokers")
    return tuple(sentences)


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
    """A record that a member wrote about itself.

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
        """The open holds, oldest first, each with its remaining partitions."""
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
    by_name = sorted(members.values(), key=lambda member: (member.first.name, member.first.at))
    return MemberTable(tuple(by_name), tuple(reversed(receipts[-_RECEIPTS_KEPT:])))
