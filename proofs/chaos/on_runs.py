"""Faults of runs: failures, kills, lost connections, refused launches, and actions in the UI."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.orchestration.storage.run_tags import BATCH_TAG, GROUP_TAG, ranges_in
from proofs.chaos.exchange import GROUP
from proofs.chaos.faults import Fault, Ground, Kind, UnderWay
from proofs.chaos.parts import member_of

if TYPE_CHECKING:
    from collections.abc import Callable

_RUNS_LOOKED_AT = 20
_LIVE = {
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
}
FIRST_ASSET = "copied"


def kill_worker(ground: Ground) -> UnderWay | None:
    """Kill the process of a run."""
    run_id = run_at_work(ground)
    if run_id is None or not ground.parts.exchange.kill(run_id):
        return None
    return UnderWay(of_run(ground, Kind.RUN_WORKER_KILLED, run_id))


def fail(ground: Ground) -> UnderWay | None:
    """Let the next finishing run fail."""
    ground.parts.exchange.fail_next()
    return UnderWay(Fault(Kind.RUN_FAILED, "the next run", partitions=frozenset()))


def cut_off(ground: Ground) -> UnderWay | None:
    """Prevent the process of a run from opening connections and files.

    The run works longer. A streaming run may be reconnected before its lease expires.
    """
    run_id = run_at_work(ground)
    exchange = ground.parts.exchange
    if run_id is None or not exchange.cut_off(run_id):
        return None
    fault = of_run(ground, Kind.RUN_CUT_OFF_FROM_STORAGE, run_id)
    shortest_s = 3 if ground.parts.is_streaming else 20
    return UnderWay(fault, ground.after(shortest_s, 35), lambda: exchange.reconnect(run_id))


def refuse_launches(ground: Ground) -> UnderWay | None:
    """Let the launcher refuse every run for a while."""
    if ground.suffers(Kind.LAUNCH_REFUSED):
        return None
    exchange = ground.parts.exchange
    exchange.refuse_launches()
    return UnderWay(
        Fault(Kind.LAUNCH_REFUSED, "all runs"), ground.after(3, 15), exchange.allow_launches
    )


def delete(ground: Ground) -> UnderWay | None:
    """Delete a run in any state, or a live streaming run."""
    record = any_run(ground, lambda run: run.status in _LIVE if ground.parts.is_streaming else True)
    if record is None:
        return None
    run = record.dagster_run
    fault = of_run(ground, Kind.RUN_DELETED, run.run_id, note=f", {run.status.value}")
    ground.parts.dagster.ui.delete_run(run.run_id)
    ground.deleted.append((record, fault.began_at))
    return UnderWay(fault)


def force_terminate(ground: Ground) -> UnderWay | None:
    """Mark a live run as cancelled, whatever its process does."""
    record = any_run(ground, lambda run: run.status in _LIVE)
    if record is None:
        return None
    run = record.dagster_run
    fault = of_run(ground, Kind.RUN_FORCE_TERMINATED, run.run_id, note=f", {run.status.value}")
    try:
        ground.parts.dagster.ui.force_terminate(run.run_id)
    except DagsterRebalanceError:  # it has already ended
        return None
    return UnderWay(fault)


def re_execute_in_part(ground: Ground) -> UnderWay | None:
    """Re-execute the first of the two assets of a failed run, which must not count for both."""
    record = any_run(ground, lambda run: run.status is dg.DagsterRunStatus.FAILURE)
    if record is None:
        return None
    run_id = record.dagster_run.run_id
    fault = of_run(ground, Kind.RUN_RE_EXECUTED_IN_PART, run_id)
    ground.parts.dagster.ui.re_execute(run_id, steps=[FIRST_ASSET])
    return UnderWay(fault)


def run_at_work(ground: Ground) -> str | None:
    """Draw a working run with a reachable process."""
    working = sorted(ground.parts.exchange.working())
    return ground.chance.choice(working) if working else None


def any_run(ground: Ground, is_wanted: Callable[[dg.DagsterRun], bool]) -> dg.RunRecord | None:
    """Draw one of the newest runs of the group."""
    found = ground.parts.instance.get_run_records(
        dg.RunsFilter(tags={GROUP_TAG: GROUP}), limit=_RUNS_LOOKED_AT
    )
    wanted = [record for record in found if is_wanted(record.dagster_run)]
    return ground.chance.choice(wanted) if wanted else None


def of_run(ground: Ground, kind: Kind, run_id: str, note: str = "") -> Fault:
    """Return a fault of a run; a streaming run is a member and may delay its partitions."""
    if ground.parts.is_streaming:
        member = member_of(run_id)
        return Fault(kind, member, partitions=ground.owned(member))
    run = ground.parts.instance.get_run_by_id(run_id)
    ranges = ranges_in(run.run_config, run.tags.get(BATCH_TAG, "")) if run is not None else ()
    return Fault(
        kind, f"run {run_id[:8]}{note}", partitions=frozenset(range_.partition for range_ in ranges)
    )
