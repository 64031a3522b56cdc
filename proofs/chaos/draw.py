"""The order and the pauses of the faults, from a seed.

Each kind comes once in every round, in random order, so a few faults already have many kinds. The
effect on real processes differs each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

_T = TypeVar("_T")
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 6.0
_WAITS_FOR_WORK = 0.6


class Draw(Generic[_T]):
    """Draws kinds of faults."""

    def __init__(self, kinds: Sequence[_T], chance: random.Random) -> None:
        self._kinds = kinds
        self._chance = chance
        self._round: list[_T] = []

    def next(self, strike: Callable[[_T], bool]) -> _T | None:
        """Draw until `strike` accepts a kind, and return it; None if none is possible now.

        Impossible kinds stay first in the queue, but do not block the next round.
        """
        kind = self._first(strike)
        if kind is None and len(self._round) < len(self._kinds):
            self._round += self._chance.sample(self._kinds, len(self._kinds))
            kind = self._first(strike)
        return kind

    def _first(self, strike: Callable[[_T], bool]) -> _T | None:
        for kind in dict.fromkeys(self._round):
            if strike(kind):
                self._round.remove(kind)
                return kind
        return None

    def pause_s(self) -> float:
        """Return the pause before the next fault; sometimes almost none, to overlap faults."""
        return self._chance.uniform(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)

    def waits_for_work(self) -> bool:
        """Return whether the next fault comes only after a commit, so the group recovers."""
        return self._chance.random() < _WAITS_FOR_WORK
