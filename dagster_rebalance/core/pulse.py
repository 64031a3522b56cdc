"""The pulse of runs: finds those that Dagster shows as working while their process has gone.

A run gives a sign of life from time to time. Only whether the sign *changes* is looked at, on the observer's own clock, so that clocks of
different machines need not agree. Time in which nobody looked does not count: a database that was away kept the runs from giving signs too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.runs import WORKING, RunSeen, RunState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LOOKS_PER_TIMEOUT = 4
"""How often a run must have been seen without a new sign, at least, before it is dead."""


@dataclass(frozen=True, slots=True)
class Sign:
    """What a run showed last, and for how long it has shown nothing else."""

    state: RunState
    heartbeat: str
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pulse:
    """The last sign of each run and its age.

    Attributes:
        heartbeat_timeout_s: A run that works and gives the same sign for so long is dead.
        start_timeout_s: The same for a run that is being launched.
        signs: By run id.
        observed_at: When the runs were last looked at.
    """

    heartbeat_timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    signs: Mapping[str, Sign] = field(default_factory=dict)
    observed_at: float = float("-inf")

    def observe(self, runs: Iterable[RunSeen], now: float) -> tuple[Pulse, tuple[str, ...]]:
        """The pulse after looking at all live runs, and the ids of those that are dead.

        A dead run is named again only after another time-out, in case it could not be ended.
        """
        signs = {}
        dead = []
        for run in runs:
            limit_s = self._limit_s(run.state)
            if limit_s is None:
                continue
            sign = self._aged(run, min(now - self.observed_at, limit_s / _LOOKS_PER_TIMEOUT))
            if sign.age_s >= limit_s:
                dead.append(run.run_id)
                sign = replace(sign, age_s=0.0)
            signs[run.run_id] = sign
        return replace(self, signs=signs, observed_at=now), tuple(dead)

    def _aged(self, run: RunSeen, step_s: float) -> Sign:
        before = self.signs.get(run.run_id)
        if before is None or (before.state, before.heartbeat) != (run.state, run.heartbeat):
            return Sign(run.state, run.heartbeat)
        return replace(before, age_s=before.age_s + step_s)

    def _limit_s(self, state: RunState) -> float | None:
        if state in WORKING:
            return self.heartbeat_timeout_s
        return self.start_timeout_s if state is RunState.STARTING else None
