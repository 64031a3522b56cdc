"""Virtual time: an event queue, one random generator, and the trace.

A process that waits for an answer lets others work (`let_others`), so anything can happen between
its read and its write. Nothing here reads a real clock.
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
"""Maximum depth of nested waits: beyond it the first actor would never get its answer. Then no run
begins anything until one has its answer; members are few, and have to keep their deadlines."""


class Violation(BaseException):
    """A broken promise."""


class Clockwork:
    """Time, chance and trace of one schedule.

    Args:
        seed: Determines the schedule.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - must be reproducible
        self.now = 1_000.0
        self.trace: deque[str] = deque(maxlen=_LINES_KEPT)
        self.steps = 0
        self.check: Callable[[], None] = lambda: None
        self.hanging: list[Hanging] = []
        self._queue: list[tuple[float, int, object, Callable[[], None]]] = []
        self._order = count()
        self._busy: list[object] = []

    def tell(self, who: object, what: str) -> None:
        self.trace.append(f"{self.now - 1000:9.2f} {who}: {what}")

    def after(self, seconds: float, actor: object, action: Callable[[], None]) -> None:
        """Schedule an action of an actor.

        The actor is a run by its id, a part of a member, or None for the world. While it waits for
        an answer, it does nothing else.
        """
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), actor, action))

    def within(self, low: float, high: float) -> float:
        """Draw a duration."""
        return low + (high - low) * self.chance.random()

    def happens(self, probability: float) -> bool:
        """Draw whether something happens."""
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
        """Stop all hanging work."""
        for work in self.hanging:
            work.give_up()

    def let_others(self, actor: object, seconds: float) -> None:
        """Let the others work while an actor waits."""
        self._busy.append(actor)
        try:
            self.run(seconds)
        finally:
            self._busy.remove(actor)

    def is_waiting(self, actor: object) -> bool:
        """Return whether an actor waits for an answer."""
        return actor in self._busy

    @property
    def is_nested(self) -> bool:
        """Whether an actor is inside a wait."""
        return bool(self._busy)
