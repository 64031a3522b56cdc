"""Plays many schedules, and says what they show: violations with their seeds, and that every transition of the table was taken."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.testing.simulation.schedule import Played, play
from dagster_rebalance.testing.simulation.transitions import counted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Proof:
    """What many schedules showed.

    Attributes:
        seed: The seed of the first schedule; the others follow it.
        schedules: How many were played.
        violations: Those in which a promise was broken.
        transitions: How often each transition of the ownership table was taken.
        rebalances: How many rebalances there were.
        commits: How many commits were recorded.
    """

    seed: int
    schedules: int
    violations: tuple[Played, ...]
    transitions: dict[str, int]
    rebalances: int
    commits: int

    @property
    def not_taken(self) -> tuple[str, ...]:
        """The transitions that never happened."""
        return tuple(name for name, count in self.transitions.items() if not count)

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "schedules": self.schedules,
            "violations": len(self.violations),
            "seed": self.seed,
            "violated_by": [{"seed": played.seed, "what": played.violation} for played in self.violations],
            "rebalances": self.rebalances,
            "commits": self.commits,
            "transitions": self.transitions,
        }
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def prove(schedules: int, seed: int, *, told: Callable[[Played], None] = lambda _: None) -> Proof:
    """Play schedules with the seeds from `seed` on; `told` hears of each."""
    violations = []
    rebalances = commits = 0
    with counted() as taken:
        for number in range(seed, seed + schedules):
            played = play(number)
            told(played)
            rebalances += played.rebalances
            commits += played.commits
            if played.violation:
                violations.append(played)
    return Proof(seed, schedules, tuple(violations), taken, rebalances, commits)
