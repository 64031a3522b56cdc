"""A sensor ends the runs whose process is gone, where no member need look at them.

The sensor keeps in its cursor for how long each sign of life has not changed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.run import named_runs
from dagster_rebalance.orchestration.runs import boot_clock

if TYPE_CHECKING:
    from collections.abc import Iterable

    import dagster as dg

    from dagster_rebalance.core.model.run import RunSeen
    from dagster_rebalance.core.runs.liveness import Liveness
    from dagster_rebalance.orchestration.runs.queries import RunLedger

_LIMIT_S = 15.0
"""How long a tick ends dead runs: a platform that does not answer must not make it time out, with
all that it requests. The pulse names again who is left."""


class DeadRuns(NamedTuple):
    """The runs that gave no sign of life for the time-out.

    Attributes:
        ended: Those that were ended in this tick.
        left: Those that could not be ended, in this tick or since.
        memory: What the next tick needs of the signs of life.
    """

    ended: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    memory: str = ""

    def cursor(self, glance: str) -> str:
        """The cursor of the sensor: first what the list of ticks is to show."""
        return f"{glance}\n{self.memory}" if self.memory else glance

    @property
    def notes(self) -> tuple[str, ...]:
        """What a tick says of those that are left."""
        if not self.left:
            return ()
        note = (
            f"{named_runs(sorted(self.left))} gave no sign of life and could not be ended, so what "
            "was begun elsewhere may be at work: the log of a tick says why. It is tried again"
        )
        return (note,)


def end_dead_runs(
    context: dg.SensorEvaluationContext, ledger: RunLedger, runs: Iterable[RunSeen], pulse: Liveness
) -> DeadRuns:
    """End the runs that gave no sign of life for the time-out; nobody else may ever do so.

    Args:
        context: The tick.
        ledger: Ends them.
        runs: What the sensor looks after.
        pulse: How long a run may be silent.
    """
    now, until = time.time(), boot_clock.seconds() + _LIMIT_S
    found, dead = pulse.remembering(context.cursor).observe(runs, now)
    # Another one comes first in each tick: those behind one that hangs have their turn, too.
    first = int(now) % max(1, len(dead))
    asked = {
        run_id: _end(context, ledger, run_id, found.signs[run_id].run.heartbeat)
        for run_id in (*dead[first:], *dead[:first])
        if boot_clock.seconds() < until
    }
    known = frozenset(run_id for run_id, is_ended in asked.items() if is_ended is not None)
    ended = frozenset(run_id for run_id in known if asked[run_id])
    return DeadRuns(ended, found.named - known, found.memory)


def _end(
    context: dg.SensorEvaluationContext, ledger: RunLedger, run_id: str, sign: str
) -> bool | None:
    """End a run; the answer is whether it was: False if it lives, None if that failed."""
    shown = named_runs([run_id])
    try:
        is_ended = ledger.end_dead(run_id, sign)
    except Exception:  # its work elsewhere may go on; the pulse names the run again
        context.log.exception("%s gave no sign of life, and could not be ended", shown)
        return None
    if is_ended:
        context.log.warning("%s gave no sign of life, and is ended", shown)
    return is_ended
