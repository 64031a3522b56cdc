"""What somebody who is no member sees of the partitions of a group, as columns and as sentences.

Owns how Kafka's word on members and an `OwnedPartition`, taken in as its next owner would, become
one row for each partition. The sentences are those of `explain`, so that a command and a member say
the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.reporting.explain import explain_partition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.model.events import Found
    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
    from dagster_rebalance.core.partitions.owned import OwnedPartition


_SILENT_S = 90.0
"""A sensor ticks every few seconds, and a tick may take a minute."""


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """A member of a group, as Kafka shows it.

    Attributes:
        member_id: Kafka's id of it.
        address: Its client id and host.
        owns: The partitions that it has. During a hold, Kafka does not count those that it has been
            asked for.
        is_to_own: The partitions that it has or will be given; empty where Kafka does not say.
    """

    member_id: str
    address: str
    owns: frozenset[TopicPartition]
    is_to_own: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True, slots=True)
class Assigned:
    """What a member has recorded of its assignment in Dagster.

    Attributes:
        member_id: Kafka's id of it.
        name: The code location, or the streaming run.
        run_id: The streaming run that it lives in; any other text of what is none.
        partitions: What it was given then.
        is_run: Whether it is a streaming run.
    """

    member_id: str
    name: str
    run_id: str
    partitions: frozenset[TopicPartition]
    is_run: bool = False


@dataclass(frozen=True, slots=True)
class Owners:
    """Who has which partition.

    Attributes:
        members: As Kafka shows them.
        assigned: As members have recorded it, newest first.
    """

    members: tuple[MemberSeen, ...]
    assigned: tuple[Assigned, ...] = ()

    def name(self, member: MemberSeen) -> str:
        """The code location or the streaming run of a member; its client where that is unknown."""
        known = (one.name for one in self.assigned if one.member_id == member.member_id)
        return next(known, member.address)

    def owner(self, partition: TopicPartition) -> str:
        """Who has a partition; empty when nobody has."""
        return next((self.name(m) for m in self.members if partition in m.owns), "")

    def owned_by(self, run_id: str) -> frozenset[TopicPartition]:
        """The partitions that a streaming run has."""
        ids = {one.member_id for one in self.assigned if one.run_id == run_id}
        return frozenset(p for m in self.members if m.member_id in ids for p in m.owns)

    def streams(self, partition: TopicPartition) -> bool:
        """Whether a streaming run has a partition."""
        runs = {one.member_id for one in self.assigned if one.is_run}
        return any(m.member_id in runs for m in self.members if partition in m.owns)

    def hold(self, partition: TopicPartition) -> str:
        """Who still holds a partition that Kafka has asked for, and who waits for it.

        Empty when it has an owner that may keep it, or the group has no members.
        """
        owners = [m for m in self.members if partition in m.owns]
        heirs = [m for m in self.members if partition in m.is_to_own and m not in owners]
        to = f"{self.name(heirs[0])} waits for it" if heirs else ""
        if owners or not self.members:
            return to
        ids = {member.member_id for member in self.members} - {m.member_id for m in heirs}
        last = next((one for one in self.assigned if partition in one.partitions), None)
        holder = f"held by {last.name}" if last is not None and last.member_id in ids else ""
        return ", ".join(filter(None, (holder, to))) or "no member has it"


@dataclass(frozen=True, slots=True)
class SensorSeen:
    """A sensor that keeps members of a group, as Dagster shows it.

    Attributes:
        name: The sensor.
        is_on: Whether a person or its code has turned it on.
        silent_for_s: How long ago its last tick began; None where it had none.
        error: What its last tick failed with; empty where it did not fail.
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
            f"{on}and its last tick was {self.silent_for_s:.0f} s ago. Read that tick: its member "
            "is about to join, its runs wait in Dagster's queue, or it says what is wrong"
        )


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition of a group.

    Attributes:
        partition: The partition.
        owner: Who has it; empty when nobody has.
        committed: The next offset to be read; None when the group has committed none.
        claims: The claimed ranges, each with its batch.
        end: The offset behind the last record; None when its leader does not answer.
        lag: Records that are not committed yet; None when that is not known.
        runs: The runs that may be at work on it.
        hold: Who holds it, or waits for it; empty when it is with its owner.
        stopped: Why it is stopped; empty when it is not.
        ordered: What a person has ordered; empty when nobody has.
        sentence: What it waits for.
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
    ordered: str
    sentence: str


def status_of(
    owned: OwnedPartition, found: Found | None, owners: Owners, now: float
) -> PartitionStatus:
    """One row.

    Args:
        owned: The partition, taken in as its next owner would.
        found: What Kafka says of it; None while a leader does not verify the committed offset.
        owners: Who has it.
        now: On the clock with which `owned` was taken in.
    """
    stored = None if found is None else found.stored
    committed = None if stored is None else stored.offset
    end, lag = None, None
    if found is not None and found.bounds.is_known:
        end = found.bounds.until
        begins = owned.ledger.next_offset if owned.ledger else committed
        lag = None if begins is None else max(0, end - max(begins, found.bounds.start))
    # What its owner is about to write or record, it writes in a moment, and nobody else does; and
    # only the owner knows since when records wait.
    seen = replace(owned, pending=None, unrecorded=None, backlog_since=None)
    sentence = explain_partition(
        seen,
        now,
        streams=owners.streams(owned.partition),
        has_members=bool(owners.members),
        is_outside=True,
    )
    if lag and not (owners.members or owned.entries or owned.stop_reason or owned.order):
        sentence = f"{owned.partition}: {lag} offsets to read wait for a member"
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
        ordered="" if owned.order is None else str(owned.order),
        sentence=sentence,
    )


def why_no_member(sensors: Iterable[SensorSeen]) -> tuple[str, ...]:
    """Why a group has no member, and what to do.

    Args:
        sensors: Those of the group.
    """
    unknown = (
        "Turn its sensor on. If it is on, see its last tick and whether its code location loads"
    )
    said = [sensor.why_no_member for sensor in sensors] or [unknown]
    return ("The group has no member, so nothing new is begun", *said)


def explanation(status: PartitionStatus, *, has_members: bool) -> tuple[str, ...]:
    """A partition in sentences: what it waits for, why, and what to do.

    Args:
        status: The partition.
        has_members: Whether the group has any.
    """
    said = [status.sentence]
    if has_members and status.owner:
        said.append(f"Its owner is {status.owner}" + (f"; {status.hold}" if status.hold else ""))
    elif has_members:
        said.append(
            f"It has no owner at the moment: {status.hold}. Whoever holds a partition waits for "
            "the runs at work on it, no longer than hold_limit_s; cancelling these ends the wait"
        )
    if status.end is None:
        said.append("Its leader does not answer: see to the brokers")
    return tuple(said)
