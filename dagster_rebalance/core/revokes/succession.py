"""Succession decides when a process that made way for another one may join the group again.

Both are processes of one code location: Dagster sends ticks to each replica of a code server in
turn. Without this rule, each new member would make the other one leave, and the next tick of that
one would make a new member: they would hand partitions to each other for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PATIENCE_S = 60.0
"""How long the sign of the successor may stay the same before it counts as gone; it changes every
15 s."""


@dataclass(frozen=True, slots=True)
class MadeWay:
    """A process that left the group for its successor.

    Attributes:
        sign: The last sign of the member that has the seat of this sensor; empty once it has left.
        since: When this process first saw that sign, on its own clock.
    """

    sign: str
    since: float

    def saw(self, sign: str, now: float) -> MadeWay:
        """The same after another look at the seat."""
        return self if sign == self.sign else replace(self, sign=sign, since=now)

    def may_join(self, now: float) -> bool:
        """Tell whether nobody has the seat any more.

        The successor left it, or its sign has not changed for `PATIENCE_S`.
        """
        return not self.sign or now - self.since >= PATIENCE_S
