"""The pulse of runs: finds those that Dagster shows as working while their process has gone.

A run gives a sign of life from time to time. Only whether the sign *changes* is looked at, on the observer's own clock, so that clocks of
different machines need not agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dagster_rebalance.core.runs import WORKING, RunSeen, RunState


@dataclass(frozen=True, slots=True)
class Pulse:
    """The last sign of each run and when it was first seen.

    Attributes:
        heartbeat_timeout_s: A run that works and gives the same sign for so long is dead.
        start_timeout_s: The same for a run that is being launched.
        signs: By run id: (state and heartbeat, when it was first seen).
    """

    heartbeat_timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    signs: Mapping[str, tuple[tuple[RunState, str], float]] = field(default_factory=dict)

    def observe(self, runs: Iterable[RunSeen], now: float) -> tuple[Pulse, tuple[str, ...]]:
        """The pulse after looking at all live runs, and the ids of those that are dead.

        A dead run is named again only after another time-out, in case it could not be ended.
        """
        signs: dict[str, tuple[tuple[RunState, str], float]] = {}
        dead = []
        for run in runs:
            limit_s = self._limit_s(run.state)
            if limit_s is None:
                continue
            sign = (run.state, run.heartbeat)
            before, since = self.signs.get(run.run_id, (sign, now))
            if before != sign:
                since = now
            if now - since >= limit_s:
                dead.append(run.run_id)
                since = now
            signs[run.run_id] = (sign, since)
        return Pulse(self.heartbeat_timeout_s, self.start_timeout_s, signs), tuple(dead)

    def _limit_s(self, state: RunState) -> float | None:
        if state in WORKING:
            return self.heartbeat_timeout_s
        return self.start_timeout_s if state is RunState.STARTING else None
