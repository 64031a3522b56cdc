"""Ticks of sensors: detection of previews, and the end of runs whose process is gone."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import dagster as dg

from dagster_rebalance.core.model.run_snapshot import format_runs
from dagster_rebalance.orchestration.runs import process
from dagster_rebalance.orchestration.storage.key_values import KeyValues

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.core.runs.liveness import Liveness
    from dagster_rebalance.orchestration.runs.run_ledger import RunLedger

MOST_REQUESTS_PER_TICK = 20
"""A run request costs Dagster's daemon 0.2 to 0.3 s, in which it evaluates no other sensor."""
_LIMIT_S = 15.0
"""The time that a tick spends on ending dead runs: a silent platform must not time the tick out."""

_OPEN: dict[str, dg.DagsterInstance] = {}
"""The open instances by `DAGSTER_HOME`: one, except in tests."""
_LOCK = threading.Lock()


def open_instance(instance: dg.DagsterInstance) -> dg.DagsterInstance:
    """Return an instance with the same storage that stays open between ticks, to read events.

    Dagster opens an instance for each tick. On SQLite, its first query of events loads all
    migrations, which takes 40 ms of CPU.
    """
    if not instance.is_persistent:
        return instance
    with _LOCK:
        home = instance.root_directory
        if home not in _OPEN:
            _OPEN[home] = dg.DagsterInstance.from_ref(instance.get_ref())
        return _OPEN[home]


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
    """The runs that sent no heartbeat for the timeout.

    Attributes:
        ended: The runs that this tick ended.
        left: The runs that could not be ended, in this tick or an earlier one.
        memory: The heartbeats with which the next tick compares, if only the cursor can keep them.
    """

    ended: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    memory: str = ""

    def cursor(self, headline: str) -> str:
        """Return the cursor of the sensor, which begins with the text for the list of ticks."""
        return f"{headline}\n{self.memory}" if self.memory else headline

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the tick about the runs that could not be ended."""
        if not self.left:
            return ()
        note = (
            f"{format_runs(sorted(self.left))} sent no heartbeat and could not be ended, so "
            "external work may continue: the log of a tick has the error. The next tick tries again"
        )
        return (note,)


def end_dead_runs(
    context: dg.SensorEvaluationContext,
    ledger: RunLedger,
    runs: Iterable[RunSnapshot],
    liveness: Liveness,
) -> DeadRuns:
    """End those of `runs` that sent no heartbeat for the timeout, because no member does so."""
    now, until = time.time(), process.boot_time_s() + _LIMIT_S
    # The list of ticks shows cursors, so the heartbeats are key-values where Dagster has these.
    store = KeyValues(context.instance)
    key = f"dagster_rebalance/sensor/{location_of(context)}:{context.sensor_name}"
    seen = liveness.deserialized(store.read([key]).get(key, context.cursor))
    verdict, dead = seen.observe(runs, now)
    memory = "" if store.set(key, verdict.serialized) else verdict.serialized
    # Each tick begins with another run: one that hangs must not block those after it.
    first = int(now) % max(1, len(dead))
    results = {
        run_id: _end(context, ledger, run_id, verdict.tracked[run_id].run.heartbeat)
        for run_id in (*dead[first:], *dead[:first])
        if process.boot_time_s() < until
    }
    known = frozenset(run_id for run_id, is_ended in results.items() if is_ended is not None)
    ended = frozenset(run_id for run_id in known if results[run_id])
    return DeadRuns(ended, verdict.reported_dead - known, memory)


def _end(
    context: dg.SensorEvaluationContext, ledger: RunLedger, run_id: str, heartbeat: str
) -> bool | None:
    """End a run. Return whether it has ended: False if it is alive, None after an error."""
    shown = format_runs([run_id])
    try:
        is_ended = ledger.end_dead(run_id, heartbeat)
    except Exception:  # its external work may continue; the next tick retries
        context.log.exception("%s sent no heartbeat, and could not be ended", shown)
        return None
    if is_ended:
        context.log.warning("%s sent no heartbeat, and is ended", shown)
    return is_ended
