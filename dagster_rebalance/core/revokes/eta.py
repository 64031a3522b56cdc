"""How long the work on a batch is likely to take, by what the last ones took.

A person who looks at a hold wants to know whether to wait for it. This module remembers how long
the member's last batches took from claim to commit, and words what follows for those under way. It
is a guess, and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_REMEMBERED = 10
_FEWEST = 3
_SHORTEST_S = 1.0
"""What is over sooner needs no forecast."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a member's last batches took.

    Attributes:
        took_s: Seconds from claim to commit, oldest first.
    """

    took_s: tuple[float, ...] = ()

    def after(self, took_s: float) -> Forecast:
        """The forecast after one more batch."""
        return Forecast((*self.took_s, took_s)[-_REMEMBERED:])

    def of(self, claimed_at: Iterable[float], now: float) -> str:
        """When batches under way are likely to be committed; empty where nobody can know.

        Args:
            claimed_at: When each of them was claimed.
            now: What the same clock shows.
        """
        since = tuple(claimed_at)
        usual_s = median(self.took_s) if len(self.took_s) >= _FEWEST else 0.0
        if not since or usual_s < _SHORTEST_S:
            return ""
        left_s = max(since) + usual_s - now
        likely = f"likely for {left_s:.0f} s more" if left_s > 0 else "already longer than usual"
        return f"{likely} (batches took {usual_s:.0f} s)"
