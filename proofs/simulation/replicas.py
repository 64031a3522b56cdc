"""Two replicas of a code server that share the ticks of one sensor.

Each has the real registry of members. A replica that made way must stay out while the other one
lives. A member whose call hangs is abandoned, and the next tick starts another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.orchestration.per_batch.hosted_members import HostedMember, Members
from proofs.simulation.clockwork import Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from proofs.simulation.clockwork import Clockwork
    from proofs.simulation.process import Process
    from proofs.simulation.seats import Seats

_FRESH_S = 40.0
"""A younger heartbeat of the lease is valid; less than the patience of the waiting replica."""


class _Hosted(HostedMember):
    """The real registry without a thread: its member is stepped from outside."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._name = process.incarnation
        self._mailbox = process.mailbox
        self._failure = None

    @property
    def is_over(self) -> bool:
        return self._process.is_gone

    @property
    def has_successor(self) -> bool:  # type: ignore[override]  # the real one notes it when its thread ends
        return self._process.has_successor

    @property
    def is_lost(self) -> bool:
        """Whether another member has to replace it."""
        return self._process.is_lost


class _Replica:
    """One process of a code server."""

    def __init__(self, clockwork: Clockwork) -> None:
        self.members = Members(clock=lambda: clockwork.now)
        self.process: Process | None = None

    @property
    def is_killed(self) -> bool:
        return self.process is not None and self.process.is_gone and not self.process.has_left


class Replicas:
    """The code server of one side.

    Args:
        side: The side.
        clockwork: Time and chance.
        seats: The leases of all sides.
        make: Creates a member of the side.
        goes_on: Whether ticks come.
    """

    def __init__(
        self,
        side: str,
        clockwork: Clockwork,
        seats: Seats,
        *,
        make: Callable[[], Process],
        goes_on: Callable[[Replicas], bool],
    ) -> None:
        self._side = side
        self._clockwork = clockwork
        self._seats = seats
        self._make = make
        self._goes_on = goes_on
        self._replicas = [_Replica(clockwork) for _ in range(2)]
        self._clockwork.after(0.3, None, self._tick)

    @property
    def is_silent(self) -> bool:
        """Whether the sensor is off."""
        return any(
            replica.process is not None and replica.process.is_retired for replica in self._replicas
        )

    def _tick(self) -> None:
        """The replicas get the ticks in turn; a killed one is restarted."""
        if not self._goes_on(self) or self.is_silent:
            return
        self._clockwork.after(self._clockwork.within(1.0, 4.0), None, self._tick)
        self._replicas.reverse()
        if self._replicas[0].is_killed:
            self._replicas[0] = _Replica(self._clockwork)
        replica = self._replicas[0]
        process = replica.process
        if process is not None and process.is_paused:
            return
        try:
            mail, _ = replica.members.tick(
                self._side,
                lambda: _Hosted(self._made(replica)),
                lambda: str(self._seats.taken(self._side) or ""),
            )
        except DagsterRebalanceError as error:
            self._clockwork.tell(f"the sensor of {self._side}", str(error))
            return
        if replica.process is not None:
            for batch_request in mail.batch_requests:
                replica.process.request(batch_request)

    def _made(self, replica: _Replica) -> Process:
        before, seat = replica.process, self._seats.taken(self._side)
        owner = next(
            (
                other.process
                for other in self._replicas
                if other is not replica and other.process is not None
            ),
            None,
        )
        if (
            before is not None
            and before.has_successor
            and not before.mailbox.is_abandoned  # its registry never heard why it left
            and seat is not None
            and owner is not None
            and owner.incarnation == seat.incarnation
            and not owner.is_gone
            and self._clockwork.now - seat.at < _FRESH_S
        ):
            msg = f"a replica joins again although {owner}, for which it made way, lives"
            raise Violation(msg)
        replica.process = self._make()
        return replica.process
