"""In the consumer protocol (KIP-848) the coordinator assigns, and members reconcile by heartbeats.

It is written from its rules; each member has an epoch of its own. A member that has something to
give back keeps its epoch until a heartbeat no longer lists it; only then does the next owner get
it. A member that does not give back within the rebalance time-out is thrown out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proofs.simulation.coordinator import Coordinator, Grant, Refusal, Seat

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.core.model.offsets import TopicPartition


class ConsumerGroup(Coordinator):
    """A group of the consumer protocol."""

    def join(self, member_id: str) -> Grant:
        """Take a member in; it owns nothing yet."""
        self.seats[member_id] = Seat(member_id, self.epoch, self.clockwork.now)
        self.membership_changed()
        return self._reconciled(self.seats[member_id])

    def heartbeat(
        self, member_id: str, epoch: int, owned: Collection[TopicPartition]
    ) -> Grant | Refusal:
        """A member says what it owns, and is told what it may have.

        An epoch behind the seat's is taken as long as the answer to the last heartbeat may have
        been lost: then the member owns no more than it was granted.
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
        """A new target for all."""
        self.epoch += 1
        self.rebalances += 1

    def metadata_changed(self) -> None:
        """Likewise."""
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
