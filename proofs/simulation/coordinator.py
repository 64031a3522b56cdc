"""The common parts of both group coordinators: members, sessions, fencing, offsets and logs.

As in Kafka, a commit is checked against the member and its epoch, not against the ownership of the
partition. `classic` and `consumer_protocol` implement the rebalances.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.errors import ClaimError
from dagster_rebalance.core.model.offsets import LogPosition, OffsetAndMetadata, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proofs.simulation.clockwork import Clockwork

TOPIC = "orders"


class Refusal(enum.Enum):
    """Reasons of a refused request."""

    UNKNOWN_MEMBER = "unknown member"
    STALE = "stale generation or epoch"
    REBALANCING = "rebalance in progress"


@dataclass(frozen=True, slots=True)
class Grant:
    """The granted partitions in an epoch."""

    epoch: int
    partitions: frozenset[TopicPartition]


@dataclass(slots=True)
class Seat:
    """A member in the coordinator's view.

    Attributes:
        member_id: Its id.
        epoch: Its generation or member epoch.
        seen_at: Time of its last request.
        owned: Its partitions: granted, and neither revoked nor removed.
        revoking: Partitions that it has to revoke (consumer protocol).
        revoke_by: Deadline for that.
        joined: Whether it has joined the current rebalance (classic).
        claims: Partitions that it reported when it joined (classic).
    """

    member_id: str
    epoch: int
    seen_at: float
    owned: set[TopicPartition] = field(default_factory=set)
    revoking: frozenset[TopicPartition] = frozenset()
    revoke_by: float = float("inf")
    joined: bool = True
    claims: frozenset[TopicPartition] = frozenset()


class Coordinator(ABC):
    """One group.

    Args:
        clockwork: Time and chance.
        partitions: Number of partitions.
        session_s: Session timeout.
        rebalance_s: Rebalance timeout (`max.poll.interval.ms`).
    """

    def __init__(
        self, clockwork: Clockwork, *, partitions: int, session_s: float, rebalance_s: float
    ) -> None:
        self.clockwork = clockwork
        self.partitions = tuple(TopicPartition(TOPIC, number) for number in range(partitions))
        self.session_s = session_s
        self.rebalance_s = rebalance_s
        self.seats: dict[str, Seat] = {}
        self.epoch = 0
        self.rebalances = 0
        self.stored: dict[TopicPartition, OffsetAndMetadata] = {}
        self.starts = dict.fromkeys(self.partitions, 0)
        self.ends = dict.fromkeys(self.partitions, 0)
        self.leader_epochs = dict.fromkeys(self.partitions, 0)
        self.topic_id = "simulated"
        self.forbidden: set[TopicPartition] = set()
        self.cuts: dict[TopicPartition, int] = {}
        self.ever_cut: set[TopicPartition] = set()
        self._led_from: dict[TopicPartition, list[tuple[int, int]]] = {
            partition: [] for partition in self.partitions
        }
        self.on_commit: (
            Callable[[str, TopicPartition, OffsetAndMetadata | None, OffsetAndMetadata], None]
            | None
        ) = None
        self.meddled: set[TopicPartition] = set()
        self._joined = 0

    @property
    def refuses_for_s(self) -> float:
        """Return how long others may block commits of a member."""
        return 0.0

    def owner(self, partition: TopicPartition) -> str | None:
        return next(
            (seat.member_id for seat in self.seats.values() if partition in seat.owned), None
        )

    def new_member_id(self) -> str:
        self._joined += 1
        return f"m{self._joined}"

    def add_partition(self) -> None:
        added = TopicPartition(TOPIC, len(self.partitions))
        self.partitions = (*self.partitions, added)
        self.starts[added] = self.ends[added] = self.leader_epochs[added] = 0
        self._led_from[added] = []
        self.clockwork.tell("kafka", f"{added} was added")
        self.metadata_changed()

    def elect(self, partition: TopicPartition) -> None:
        self.leader_epochs[partition] += 1
        end = self.ends[partition]
        known = [(epoch, start) for epoch, start in self._led_from[partition] if start <= end]
        self._led_from[partition] = [*known, (self.leader_epochs[partition], end)]

    def cut_off(self, partition: TopicPartition, at: int) -> None:
        """Truncate the log, as in an unclean election."""
        self.clockwork.tell(
            "kafka", f"loses the records of {partition} from {at} to {self.ends[partition]}"
        )
        self.ends[partition] = at
        self.cuts[partition] = min(at, self.cuts.get(partition, at))
        self.ever_cut.add(partition)
        self.elect(partition)

    def make_topic_anew(self) -> None:
        """Recreate the topic, without committed offsets."""
        self.topic_id += "-again"
        self.clockwork.tell("kafka", f"deletes the topic; it is made again as {self.topic_id}")
        self.stored.clear()
        for partition in self.partitions:
            self.starts[partition] = self.ends[partition] = self.leader_epochs[
                partition
            ] = self.cuts[partition] = 0
            self._led_from[partition].clear()
            self.ever_cut.add(partition)

    def has_lost(self, partition: TopicPartition, position: LogPosition) -> bool:
        """Return whether the log of a leader epoch no longer reaches an offset."""
        epoch = (
            self.leader_epochs[partition]
            if position.leader_epoch is None
            else position.leader_epoch
        )
        end = next(
            (start for later, start in self._led_from[partition] if later > epoch),
            self.ends[partition],
        )
        return end < position.offset

    def is_lost(self, partition: TopicPartition) -> bool:
        """Return whether the group has no offset, or committed or claimed records were lost."""
        stored = self.stored.get(partition)
        try:
            read = decode(stored) if stored is not None else None
        except ClaimError:
            return False
        if read is None or read.log.topic_id not in {"", self.topic_id}:
            return True
        return self.has_lost(partition, LogPosition(read.claimed_until, read.log.leader_epoch))

    def commit(
        self, member_id: str, epoch: int, offsets: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> Refusal | None:
        """Commit offsets of a known member in its current epoch."""
        refusal = self.refusal(member_id, epoch)
        if refusal is None:
            for partition, new in offsets.items():
                before = self.stored.get(partition)
                self.stored[partition] = new
                if self.on_commit is not None:
                    self.on_commit(member_id, partition, before, new)
        return refusal

    def refusal(self, member_id: str, epoch: int) -> Refusal | None:
        """Return the reason to refuse a commit, or None."""
        seat = self.seats.get(member_id)
        if seat is None:
            return Refusal.UNKNOWN_MEMBER
        return None if epoch == seat.epoch else Refusal.STALE

    def throw_out(self, member_id: str, why: str) -> None:
        """Remove a member and free its partitions; it detects that later."""
        if self.seats.pop(member_id, None) is not None:
            self.clockwork.tell("kafka", f"throws {member_id} out: {why}")
            self.membership_changed()

    def leave(self, member_id: str) -> None:
        if self.seats.pop(member_id, None) is not None:
            self.clockwork.tell("kafka", f"{member_id} has left")
            self.membership_changed()

    def look_at_clocks(self) -> None:
        """Apply the timeouts."""
        now = self.clockwork.now
        for seat in tuple(self.seats.values()):
            if now - seat.seen_at > self.session_s:
                self.throw_out(seat.member_id, "its session has timed out")
            elif now > seat.revoke_by:
                self.throw_out(seat.member_id, "it did not give back in time")

    def shares(self, wanted: Mapping[str, frozenset[TopicPartition]]) -> dict[TopicPartition, str]:
        """Return an even share for each member with the fewest moves from `wanted`."""
        if not wanted:
            return {}
        members = sorted(wanted, key=lambda member_id: (-len(wanted[member_id]), member_id))
        least, extra = divmod(len(self.partitions), len(members))
        shares: dict[TopicPartition, str] = {}
        room: list[str] = []
        for rank, member_id in enumerate(members):
            quota = least + (rank < extra)
            kept = [
                partition for partition in sorted(wanted[member_id]) if partition not in shares
            ][:quota]
            shares.update(dict.fromkeys(kept, member_id))
            room += [member_id] * (quota - len(kept))
        rest = [partition for partition in self.partitions if partition not in shares]
        return {**shares, **dict(zip(rest, room, strict=True))}

    @abstractmethod
    def membership_changed(self) -> None:
        """A member came or went."""

    @abstractmethod
    def metadata_changed(self) -> None:
        """The topic changed."""
