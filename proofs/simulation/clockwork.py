"""Virtual time: a queue of what happens next, one source of chance, and the trace that people read.

Owns the order of things. A process that waits for an answer lets the others work meanwhile
(`let_others`), so that anything can happen between a read and the write behind it. It must never
read a real clock, and draws from one seeded generator only.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from proofs.simulation.hanging import Hanging

_LINES_KEPT = 5_000
_MOST_WAITING = 16
"""With more actors that wait inside each other there would always be one more: the first would
never get its answer. Then no run begins anything until one of them has its answer; members are few,
and have to keep their limits."""


class Violation(BaseException):
    """A promise was broken."""


class Clockwork:
    """Time, chance and trace of one schedule.

    Args:
        seed: Decides everything.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - nobody is to be surprised: it must give the same again
        self.now = 1_000.0
        self.trace: deque[str] = deque(maxlen=_LINES_KEPT)
        self.steps = 0
        self.check: Callable[[], None] = lambda: None
        self.hanging: list[Hanging] = []
        self._queue: list[tuple[float, int, object, Callable[[], None]]] = []
        self._order = count()
        self._busy: list[object] = []

    def tell(self, who: object, what: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.now - 1000:9.2f} {who}: {what}")

    def after(self, seconds: float, actor: object, action: Callable[[], None]) -> None:
        """Let an actor do something later.

        The actor is a run, by its id, or a part of a member, or None for the world. While the actor
        waits for an answer, it does nothing else.
        """
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), actor, action))

    def within(self, low: float, high: float) -> float:
        """A time, drawn."""
        return low + (high - low) * self.chance.random()

    def happens(self, probability: float) -> bool:
        """Whether something happens, drawn."""
        return self.chance.random() < probability

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        waiting = []
        while self._queue and self._queue[0][0] <= until:
            entry = heapq.heappop(self._queue)
            actor = entry[2]
            if actor in self._busy or (isinstance(actor, str) and len(self._busy) >= _MOST_WAITING):
                waiting.append(entry)
                continue
            self.now = max(self.now, entry[0])
            entry[3]()
            self.steps += 1
            self.check()
        self.now = max(self.now, until)
        for entry in waiting:
            heapq.heappush(self._queue, entry)

    def stop(self) -> None:
        """End what still hangs: nothing happens any more."""
        for work in self.hanging:
            work.give_up()

    def let_others(self, actor: object, seconds: float) -> None:
        """An actor waits; everybody else goes on."""
        self._busy.append(actor)
        try:
            self.run(seconds)
        finally:
            self._busy.remove(actor)

    def is_waiting(self, actor: object) -> bool:
        """Whether an actor waits for an answer."""
        return actor in self._busy

    @property
    def is_nested(self) -> bool:
        """Whether somebody is in the middle of something."""
        return bool(self._busy)
