"""A sensor ends the runs whose process is gone, where no member need look at them.

The sensor keeps in its cursor for how long each sign of life has not changed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dagster_rebalance.core.runs import named_runs
from dagster_rebalance.orchestration import clocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    import dagster as dg

    from dagster_rebalance.core.pulse import Pulse
    from dagster_rebalance.core.runs import RunSeen
    from dagster_rebalance.orchestration.runs import RunLedger

_LIMIT_S = 15.0
"""How long a tick ends dead runs: a platform that does not answer must not make it time out, with
all that it requests. The pulse names again who is left."""


def end_dead_runs(
    context: dg.SensorEvaluationContext, ledger: RunLedger, runs: Iterable[RunSeen], pulse: Pulse
) -> frozenset[str]:
    """End the runs that gave no sign of life for the time-out; nobody else may ever do so.

    Args:
        context: The tick.
        ledger: Ends them.
        runs: What the sensor looks after.
        pulse: How long a run may be silent.

    Returns:
        The runs that were ended.
    """
    now, until = time.time(), clocks.seconds() + _LIMIT_S
    found, dead = pulse.remembering(context.cursor).observe(runs, now)
    context.update_cursor(found.memory)
    # Another one comes first in each tick: those behind one that hangs have their turn, too.
    first = int(now) % max(1, len(dead))
    return frozenset(
        run_id
        for run_id in (*dead[first:], *dead[:first])
        if clocks.seconds() < until
        and _is_ended(context, ledger, run_id, found.signs[run_id].run.heartbeat)
    )


def _is_ended(
    context: dg.SensorEvaluationContext, ledger: RunLedger, run_id: str, sign: str
) -> bool:
    shown = named_runs([run_id])
    try:
        is_ended = ledger.end_dead(run_id, sign)
    except Exception:  # its work elsewhere may go on; the pulse names the run again
        context.log.exception("%s gave no sign of life, and could not be ended", shown)
        return False
    if is_ended:
        context.log.warning("%s gave no sign of life, and is ended", shown)
    return is_ended
