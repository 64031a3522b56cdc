"""Play many schedules; report violations with their seeds, and the transitions that were taken."""

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
"""Schedules per message between processes: about a second."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of many schedules.

    Attributes:
        seed: Seed of the first schedule; the others follow.
        schedules: Number of schedules.
        violations: Schedules with a broken promise.
        transitions: Count of each transition of the ownership table.
        rebalances: Number of rebalances.
        commits: Number of recorded commits.
    """

    seed: int
    schedules: int
    violations: tuple[Played, ...]
    transitions: dict[str, int]
    rebalances: int
    commits: int

    @property
    def not_taken(self) -> tuple[str, ...]:
        """The transitions that were never taken."""
        return tuple(name for name, count in self.transitions.items() if not count)

    def write(self, path: Path) -> None:
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
    """Return a seed from the clock for new schedules; the caller must print it."""
    return time.time_ns() // 1_000_000 % _SEEDS


def prove(
    schedules: int,
    seed: int,
    *,
    told: Callable[[Played], None] = lambda _: None,
    workers: int | None = None,
) -> Proof:
    """Play the schedules with the seeds from `seed` on.

    Args:
        schedules: Number of schedules.
        seed: Seed of the first.
        told: Receives each result in the order of the seeds; only violations include traces.
        workers: Number of processes; by default one per core.
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
    """Play a chunk, and drop the traces without violations, which are large messages."""
    with counted() as taken:
        chunk = [play_all_of(seed) for seed in seeds]
    return [played if played.violation else replace(played, trace=()) for played in chunk], taken
