"""The process of a simulated run, independent of Dagster's view of it.

Its lease works as with the real heartbeat: without heartbeats it stops itself before it can count
as dead.
"""

from __future__ import annotations

from dataclasses import dataclass

BEAT_S = 2.0
"""A sixth of the heartbeat timeout of all schedules."""
LEASE_S = 4 * BEAT_S
"""A process stops itself after this time without a heartbeat: two thirds of the timeout."""
STOPPING_S = (0.1, BEAT_S)
"""How long an interrupted process still works."""
LOOK_S = 0.4
"""Interval in which a process reads its run."""


@dataclass(slots=True)
class RunProcess:
    """The process of a run.

    Attributes:
        is_working: It, or its Spark work, writes the output.
        is_gone: It does not exist.
        has_begun: It has given its first heartbeat, before its start check.
        silent_since: When it was disconnected from the storage, was suspended, or ended.
        is_frozen: It is suspended; its Spark work continues.
        has_finished: It has reported its end.
        is_over: It refused itself, or a member has ended it.
        has_signed: It was killed between its first heartbeat and the event of its start.
        has_refused: Its start check failed, even if its tags do not record it.
        signs_from: Number of the heartbeat at time 0, as each process has its own clock.
    """

    is_working: bool = False
    is_gone: bool = False
    has_begun: bool = False
    silent_since: float | None = None
    is_frozen: bool = False
    has_finished: bool = False
    is_over: bool = False
    has_signed: bool = False
    has_refused: bool = False
    signs_from: int = 0

    @property
    def is_heard(self) -> bool:
        return not self.is_gone and self.silent_since is None

    def beat(self, now: float) -> int:
        """Return the number of its last heartbeat."""
        return int((now if self.silent_since is None else self.silent_since) / BEAT_S)

    def sign(self, now: float) -> str:
        """Return its last heartbeat as stored in Dagster."""
        return str(self.signs_from + self.beat(now))

    @property
    def is_seen(self) -> bool:
        """Whether it has given a heartbeat."""
        return self.has_begun or self.has_signed

    def is_leased(self, now: float) -> bool:
        """Return whether its lease is valid by its own clock."""
        return now - self.beat(now) * BEAT_S < LEASE_S
