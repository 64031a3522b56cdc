"""The process of a simulated run: what is physically so, whatever Dagster shows.

Owns the lease, as the real heartbeat keeps it: a process that can give no sign of life stops itself
before anybody may take it for dead.
"""

from __future__ import annotations

from dataclasses import dataclass

BEAT_S = 2.0
"""A sixth of the heartbeat time-out of all schedules."""
LEASE_S = 4 * BEAT_S
"""After so long without a sign, a process stops itself: two thirds of the time-out."""
STOPPING_S = (0.1, BEAT_S)
"""How long a process that was interrupted still works, before it ends hard."""
LOOK_S = 0.4
"""How often a process looks at its run."""


@dataclass(slots=True)
class RunProcess:
    """The process of a run, which Dagster knows only from what it reports.

    Attributes:
        is_working: It writes its output, or its Spark work does, which may outlive it.
        is_gone: It does not exist (any more).
        has_begun: It has given a sign of life, which it does before it looks whether it may work.
        silent_since: When it was cut off from Dagster's storage, was frozen or ended.
        is_frozen: It is suspended: it does nothing, but its Spark work goes on.
        has_finished: It has said that it is finished.
        is_over: It refused itself, or a member has seen to it that nothing of it works.
        has_signed: Its first sign is written, and it was killed before the mark that it has begun.
        has_refused: It has found that it must not work, whether or not its tags say so.
        signs_from: The number of a sign at the beginning of time: each process has a clock of its
            own.
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
        """Whether it lives, and Dagster's storage hears it."""
        return not self.is_gone and self.silent_since is None

    def beat(self, now: float) -> int:
        """The number of its last sign."""
        return int((now if self.silent_since is None else self.silent_since) / BEAT_S)

    def sign(self, now: float) -> str:
        """Its last sign, as Dagster's storage has it."""
        return str(self.signs_from + self.beat(now))

    @property
    def is_seen(self) -> bool:
        """Whether it has given a sign."""
        return self.has_begun or self.has_signed

    def is_leased(self, now: float) -> bool:
        """Whether it may still work, by its own clock."""
        return now - self.beat(now) * BEAT_S < LEASE_S
