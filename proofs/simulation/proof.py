"""A proof plays many schedules, and reports violations with their seeds.

It also says whether every transition of the table was taken.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.partitions.state_machine import TRANSITIONS
from proofs.simulation.schedule import Played, play_all_of
from proofs.simulation.transitions import Taken, counted, name_of
from proofs.simulation.workers import spread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SEEDS = 10**10
_CHUNK = 20
"""So many schedules take about a second: short enough to stop, long enough to be worth a message
between processes."""


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
            "violated_by": [
                {"seed": played.seed, "what": played.violation} for played in self.violations
            ],
            "rebalances": self.rebalances,
            "commits": self.commits,
            "transitions": self.transitions,
        }
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def fresh_seed() -> int:
    """A seed from the clock, so that each time schedules are played that nobody has played.

    Whoever uses it must show it.
    """
    return time.time_ns() // 1_000_000 % _SEEDS


def prove(
    schedules: int,
    seed: int,
    *,
    told: Callable[[Played], None] = lambda _: None,
    workers: int | None = None,
) -> Proof:
    """Play schedules with the seeds from `seed` on.

    Args:
        schedules: How many.
        seed: The seed of the first.
        told: Hears of each, in the order of the seeds. Only one with a violation comes with its
            trace.
        workers: How many processes play; one for each core unless it says otherwise.
    """
    violations = []
    rebalances = commits = 0
    taken: Counter[str] = Counter()
    seeds = range(seed, seed + schedules)
    chunks = [seeds[at : at + _CHUNK] for at in range(0, schedules, _CHUNK)]
    for chunk, taken_in_it in spread(_play_all, chunks, workers=workers):
        taken.update(taken_in_it)
        for played in chunk:
            told(played)
            rebalances += played.rebalances
            commits += played.commits
            if played.violation:
                violations.append(played)
    return Proof(
        seed,
        schedules,
        tuple(violations),
        {name_of(step): taken[name_of(step)] for step in TRANSITIONS},
        rebalances,
        commits,
    )


def _play_all(seeds: range) -> tuple[list[Played], Taken]:
    """Play a chunk of schedules, and drop the trace of each one without a violation.

    The answer comes from another process and has to be small: thousands of lines for a schedule in
    which nothing happened are of no use.
    """
    with counted() as taken:
        chunk = [play_all_of(seed) for seed in seeds]
    return [played if played.violation else replace(played, trace=()) for played in chunk], taken
