"""The consumer protocol (KIP-848) from its rules: members reconcile assignments by heartbeat.

Each member has an epoch, which stays until a heartbeat no longer lists the revoked partitions; only
then are they assigned again. A member that exceeds the rebalance timeout is removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proofs.simulation.coordinator import Coordinator, Grant, Refusal, Seat

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.core.model.offsets import TopicPartition


class ConsumerGroup(Coordinator):
    """A group with the consumer protocol."""

    def join(self, member_id: str) -> Grant:
        """Add a member without partitions."""
        self.seats[member_id] = Seat(member_id, self.epoch, self.clockwork.now)
        self.membership_changed()
        return self._reconciled(self.seats[member_id])

    def heartbeat(
        self, member_id: str, epoch: int, owned: Collection[TopicPartition]
    ) -> Grant | Refusal:
        """Handle a heartbeat with the owned partitions, and return the assignment.

        An older epoch is accepted while the last answer may be lost, if the member owns no more
        than it was granted.
        """
        seat = self.seats.get(member_id)
        if seat is None:
            return Refusal.UNKNOWN_MEMBER
        if epoch > seat.epoch or not seat.owned.issuperset(owned):
            self.throw_out(member_id, "its epoch is fenced")
            return Refusal.UNKNOWN_MEMBER
        seat.seen_at = self.clockwork.now
        if seat.revoking and seat.revoking.isdisjoint(owned) and epoch == seat.epoch:
            seat.owned -= seat.revoking
            seat.revoking, seat.revoke_by = frozenset(), float("inf")
        return self._reconciled(seat)

    def membership_changed(self) -> None:
        self.epoch += 1
        self.rebalances += 1

    def metadata_changed(self) -> None:
        self.membership_changed()

    def _reconciled(self, seat: Seat) -> Grant:
        has = {
            other.member_id: frozenset(other.owned - other.revoking)
            for other in self.seats.values()
        }
        target = {
            partition
            for partition, member_id in self.shares(has).items()
            if member_id == seat.member_id
        }
        surplus = frozenset(seat.owned - target)
        if surplus and not seat.revoking:
            seat.revoking, seat.revoke_by = surplus, self.clockwork.now + self.rebalance_s
        if seat.revoking:
            return Grant(seat.epoch, frozenset(seat.owned - seat.revoking))
        seat.owned |= {partition for partition in target if self.owner(partition) is None}
        seat.epoch = self.epoch
        return Grant(seat.epoch, frozenset(seat.owned))
