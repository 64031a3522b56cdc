"""Seats say which replica of a code server is the member; the other one stands back meanwhile.

One value for each side, which its member writes over and over, as in Dagster's storage.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of the member that has a seat.

    Attributes:
        incarnation: The member.
        at: When it was written.
    """

    incarnation: str
    at: float

    def __str__(self) -> str:
        return f"{self.incarnation} {self.at}"


class Seats:
    """The seats of all sides."""

    def __init__(self) -> None:
        self._signs: dict[str, Sign] = {}

    def keep(self, incarnation: str, now: float) -> None:
        """The member of a side gives a sign."""
        self._signs[_side(incarnation)] = Sign(incarnation, now)

    def give_up(self, incarnation: str) -> None:
        """A member frees its seat, unless another one has it by now."""
        taken = self.taken(_side(incarnation))
        if taken is not None and taken.incarnation == incarnation:
            del self._signs[_side(incarnation)]

    def taken(self, side: str) -> Sign | None:
        """The last sign of the member that has the seat of a side; None when it is free."""
        return self._signs.get(side)


def _side(incarnation: str) -> str:
    return incarnation.partition(".")[0]
