"""The draw decides which fault comes when.

Each kind comes once in every round, and each round is in random order, so a few faults already are
of many kinds. Owns the draw. The seed decides the order and the pauses; the effect on the parts is
never the same twice.
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
    """Draws kinds of faults.

    Args:
        kinds: What there is.
        chance: The source of chance.
    """

    def __init__(self, kinds: Sequence[_T], chance: random.Random) -> None:
        self._kinds = kinds
        self._chance = chance
        self._round: list[_T] = []

    def next(self, strike: Callable[[_T], bool]) -> _T | None:
        """Draw until `strike` takes one, which is returned; None when none can be done now.

        What could not be done stays first in line. It does not keep the next round from beginning.
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
        """How long until the next one: now and then hardly at all, so that faults meet."""
        return self._chance.uniform(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)

    def waits_for_work(self) -> bool:
        """Whether the next fault comes only after a commit.

        Faults to a heap of ruins would prove little.
        """
        return self._chance.random() < _WAITS_FOR_WORK
