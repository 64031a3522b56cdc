"""The classic protocol from its rules: join, sync, one generation for all members.

A rebalance waits for every member to join, at most the rebalance timeout; late members are removed.
In cooperative mode a partition is revoked in one generation and assigned in a later one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proofs.simulation.coordinator import Coordinator, Grant, Refusal, Seat

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.core.model.offsets import TopicPartition
    from proofs.simulation.clockwork import Clockwork

_COMPLETING_S = 0.3
"""Time between the last join and the leader's assignment; commits are refused."""


class ClassicGroup(Coordinator):
    """A group with the classic protocol.

    Args:
        clockwork: Time and chance.
        partitions: Number of partitions.
        session_s: Session timeout.
        rebalance_s: Rebalance timeout.
        is_eager: Whether members revoke everything before they join.
    """

    def __init__(
        self,
        clockwork: Clockwork,
        *,
        partitions: int,
        session_s: float,
        rebalance_s: float,
        is_eager: bool,
    ) -> None:
        super().__init__(
            clockwork, partitions=partitions, session_s=session_s, rebalance_s=rebalance_s
        )
        self.is_eager = is_eager
        self._join_by: float | None = None
        self._syncs_at: float | None = None

    @property
    def is_preparing(self) -> bool:
        """Whether members have to join."""
        return self._join_by is not None

    @property
    def refuses_for_s(self) -> float:
        """Return how long a rebalance waits for a hanging member.

        A member that has not received the previous generation when it begins receives none until it
        ends.
        """
        return self.rebalance_s + _COMPLETING_S

    def join(self, member_id: str, owned: Collection[TopicPartition]) -> None:
        """Join the next generation.

        Heartbeats return the assignment; they also stand for SyncGroup.
        """
        seat = self.seats.setdefault(member_id, Seat(member_id, -1, self.clockwork.now))
        seat.seen_at = self.clockwork.now
        seat.claims = frozenset(owned)
        seat.owned &= seat.claims
        seat.revoking = frozenset()
        if not self.is_preparing:
            self._prepare()
        seat.joined = True
        self._complete_if_all_joined()

    def heartbeat(self, member_id: str) -> Grant | Refusal | None:
        """Handle a heartbeat: return the assignment, the request to join, or nothing in between."""
        seat = self.seats.get(member_id)
        if seat is None:
            return Refusal.UNKNOWN_MEMBER
        seat.seen_at = self.clockwork.now
        if self.is_preparing and not seat.joined:
            return Refusal.REBALANCING
        if self.is_preparing or self._syncs_at is not None:
            return None
        return Grant(seat.epoch, frozenset(seat.owned - seat.revoking))

    def refusal(self, member_id: str, epoch: int) -> Refusal | None:
        """Refuse commits between join and sync."""
        if member_id in self.seats and self._syncs_at is not None:
            return Refusal.REBALANCING
        return super().refusal(member_id, epoch)

    def look_at_clocks(self) -> None:
        """Apply sessions, the rebalance timeout, and the leader's answer."""
        super().look_at_clocks()
        now = self.clockwork.now
        if self._join_by is not None and now >= self._join_by:
            late = [seat.member_id for seat in self.seats.values() if not seat.joined]
            for member_id in late:
                self.clockwork.tell("kafka", f"throws {member_id} out: it did not join in time")
                del self.seats[member_id]
            self._complete_if_all_joined()
        if self._syncs_at is not None and now >= self._syncs_at:
            self._sync()

    def membership_changed(self) -> None:
        """All members join again."""
        if not self.is_preparing:
            self._prepare()
        self._complete_if_all_joined()

    def metadata_changed(self) -> None:
        """The leader joins again, and with it all members."""
        self.membership_changed()

    def _prepare(self) -> None:
        self.rebalances += 1
        self._join_by, self._syncs_at = self.clockwork.now + self.rebalance_s, None
        for seat in self.seats.values():
            seat.joined = False

    def _complete_if_all_joined(self) -> None:
        if self.is_preparing and all(seat.joined for seat in self.seats.values()):
            self._join_by = None
            self.epoch += 1
            for seat in self.seats.values():
                seat.epoch = self.epoch
            self._syncs_at = self.clockwork.now + _COMPLETING_S

    def _sync(self) -> None:
        self._syncs_at = None
        has = {
            seat.member_id: frozenset() if self.is_eager else seat.claims
            for seat in self.seats.values()
        }
        for partition, member_id in self.shares(has).items():
            holder = next((other for other, claimed in has.items() if partition in claimed), None)
            for seat in self.seats.values():
                seat.owned.discard(partition)
            if holder is None or holder == member_id:
                self.seats[member_id].owned.add(partition)
            else:
                # Its owner loses it in this generation. Until the owner has rejoined without the
                # partition, it is assigned to no other member.
                self.seats[holder].owned.add(partition)
                self.seats[holder].revoking |= {partition}
