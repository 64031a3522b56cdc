"""Ticks of sensors: detection of previews, and the end of runs whose process is gone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.run_snapshot import format_runs
from dagster_rebalance.orchestration.runs import process

if TYPE_CHECKING:
    from collections.abc import Iterable

    import dagster as dg

    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.core.runs.liveness import Liveness
    from dagster_rebalance.orchestration.runs.run_ledger import RunLedger

MOST_REQUESTS_PER_TICK = 20
"""A run request costs Dagster's daemon 0.2 to 0.3 s, in which it evaluates no other sensor."""
_LIMIT_S = 15.0
"""The time that a tick spends on ending dead runs: a silent platform must not time the tick out."""


def is_real_tick(context: dg.SensorEvaluationContext) -> bool:
    """Whether Dagster's daemon evaluates the sensor.

    "Preview tick result" calls the same function and must have no effects.
    """
    return bool(context.log_key and context.log_key[-1].isdigit())


def location_of(context: dg.SensorEvaluationContext) -> str:
    """Return the code location of a sensor."""
    origin = context.code_location_origin
    return origin.location_name if origin else "unknown"


class DeadRuns(NamedTuple):
    """The runs that sent no heartbeat for the time-out.

    Attributes:
        ended: The runs that this tick ended.
        left: The runs that could not be ended, in this tick or an earlier one.
        memory: The heartbeats that the next tick compares with; a part of its cursor.
    """

    ended: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    memory: str = ""

    def cursor(self, headline: str) -> str:
        """Return the cursor of the sensor, which begins with the text for the list of ticks."""
        return f"{headline}\n{self.memory}" if self.memory else headline

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of a tick on the runs that could not be ended."""
        if not self.left:
            return ()
        note = (
            f"{format_runs(sorted(self.left))} sent no heartbeat and could not be ended, so "
            "external work may continue: the log of a tick has the error. It is retried"
        )
        return (note,)


def end_dead_runs(
    context: dg.SensorEvaluationContext,
    ledger: RunLedger,
    runs: Iterable[RunSnapshot],
    liveness: Liveness,
) -> DeadRuns:
    """End those of `runs` that sent no heartbeat for the time-out; no member does it for them."""
    now, until = time.time(), process.boot_time_s() + _LIMIT_S
    verdict, dead = liveness.deserialized(context.cursor).observe(runs, now)
    # Each tick begins with another run: one that hangs must not block those after it.
    first = int(now) % max(1, len(dead))
    results = {
        run_id: _end(context, ledger, run_id, verdict.tracked[run_id].run.heartbeat)
        for run_id in (*dead[first:], *dead[:first])
        if process.boot_time_s() < until
    }
    known = frozenset(run_id for run_id, is_ended in results.items() if is_ended is not None)
    ended = frozenset(run_id for run_id in known if results[run_id])
    return DeadRuns(ended, verdict.reported_dead - known, verdict.serialized)


def _end(
    context: dg.SensorEvaluationContext, ledger: RunLedger, run_id: str, heartbeat: str
) -> bool | None:
    """End a run. Return whether it ended: False if it is alive, None if that failed."""
    shown = format_runs([run_id])
    try:
        is_ended = ledger.end_dead(run_id, heartbeat)
    except Exception:  # its external work may continue; the next tick retries
        context.log.exception("%s sent no heartbeat, and could not be ended", shown)
        return None
    if is_ended:
        context.log.warning("%s sent no heartbeat, and is ended", shown)
    return is_ended
