"""Leases of the sides: which replica of a code server is the member."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sign:
    """The heartbeat of a lease: the member, and the time of the write."""

    incarnation: str
    at: float

    def __str__(self) -> str:
        return f"{self.incarnation} {self.at}"


class Seats:
    def __init__(self) -> None:
        self._signs: dict[str, Sign] = {}

    def keep(self, incarnation: str, now: float) -> None:
        self._signs[_side(incarnation)] = Sign(incarnation, now)

    def give_up(self, incarnation: str) -> None:
        """Release a lease, unless another member holds it."""
        taken = self.taken(_side(incarnation))
        if taken is not None and taken.incarnation == incarnation:
            del self._signs[_side(incarnation)]

    def taken(self, side: str) -> Sign | None:
        """Return the last heartbeat of a side's lease; None if it is free."""
        return self._signs.get(side)


def _side(incarnation: str) -> str:
    return incarnation.partition(".")[0]
