"""Faults of streaming runs and of their code location."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.orchestration.storage.run_tags import GROUP_TAG, VERSION_TAG
from proofs.chaos.exchange import GROUP, HEARTBEAT_TIMEOUT_S
from proofs.chaos.faults import Fault, Ground, Kind, UnderWay
from proofs.chaos.on_members import bring_back
from proofs.chaos.on_runs import any_run, of_run, run_at_work
from proofs.chaos.parts import STREAMS

if TYPE_CHECKING:
    from collections.abc import Callable

_OVER = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)


def freeze(ground: Ground) -> UnderWay | None:
    """Suspend a run for less than its heartbeat timeout, possibly beyond its session timeout."""
    return _frozen(ground, Kind.RUN_FROZEN, 2, HEARTBEAT_TIMEOUT_S - 4)


def freeze_long(ground: Ground) -> UnderWay | None:
    """Suspend a run until it counts as dead."""
    return _frozen(ground, Kind.RUN_FROZEN_LONG, HEARTBEAT_TIMEOUT_S + 2, 2 * HEARTBEAT_TIMEOUT_S)


def cancel(ground: Ground) -> UnderWay | None:
    """Cancel a working run."""
    run_id = _cancelled(ground)
    if run_id is None:
        return None
    return UnderWay(of_run(ground, Kind.RUN_CANCELLED, run_id), _has_ended(ground, run_id))


def refuse_launches(ground: Ground) -> UnderWay | None:
    """Let the launcher refuse every run for a while, and cancel a run, so a new one is required."""
    if ground.suffers(Kind.LAUNCH_REFUSED):
        return None
    ground.parts.exchange.refuse_launches()
    run_id = _cancelled(ground)
    if run_id is None:
        ground.parts.exchange.allow_launches()
        return None
    fault = of_run(ground, Kind.LAUNCH_REFUSED, run_id)
    return UnderWay(fault, ground.after(10, 20), ground.parts.exchange.allow_launches)


def deploy(ground: Ground) -> UnderWay | None:
    """Deploy new code; repaired when no run with older code is left."""
    if ground.suffers(Kind.CODE_DEPLOYED, Kind.CODE_SERVER_AWAY, Kind.CODE_SERVER_KILLED):
        return None
    version = ground.parts.exchange.deploy()
    fault = Fault(Kind.CODE_DEPLOYED, f"version {version}")
    with suppress(
        DagsterRebalanceError
    ):  # the storage is unavailable: a later fault loads the code
        ground.parts.dagster.ui.reload(STREAMS)

    def is_everywhere() -> bool:
        with suppress(Exception):  # any error of Dagster's storage during an outage
            return all(run.tags.get(VERSION_TAG) == version for run in _live(ground))
        return False

    return UnderWay(fault, is_everywhere)


def kill_code_server(ground: Ground) -> UnderWay | None:
    """Kill the code server; its runs live on."""
    return _without_code_server(
        ground, Kind.CODE_SERVER_AWAY, ground.parts.dagster.locations[STREAMS].server.kill
    )


def kill_with_runs(ground: Ground) -> UnderWay | None:
    """Kill the code server and all runs, as in the loss of a machine."""
    return _without_code_server(
        ground, Kind.CODE_SERVER_KILLED, ground.parts.dagster.locations[STREAMS].stop_at_once
    )


def _without_code_server(ground: Ground, kind: Kind, end: Callable[[], None]) -> UnderWay | None:
    if ground.member(STREAMS) is None:
        return None
    hits_runs = kind is Kind.CODE_SERVER_KILLED
    fault = Fault(kind, STREAMS, partitions=None if hits_runs else frozenset())
    end()
    return UnderWay(fault, ground.after(0, 8), lambda: bring_back(ground.parts, STREAMS))


def _frozen(ground: Ground, kind: Kind, shortest_s: float, longest_s: float) -> UnderWay | None:
    exchange, run_id = ground.parts.exchange, run_at_work(ground)
    if run_id is None or ground.suffers(Kind.RUN_FROZEN, Kind.RUN_FROZEN_LONG):
        return None
    fault = of_run(ground, kind, run_id)
    if not exchange.send(run_id, signal.SIGSTOP):
        return None

    def thaw() -> None:
        exchange.send(run_id, signal.SIGCONT)

    return UnderWay(fault, ground.after(shortest_s, longest_s), thaw)


def _cancelled(ground: Ground) -> str | None:
    """Cancel a run and return its id, or None without one."""
    record = any_run(ground, lambda run: run.status is dg.DagsterRunStatus.STARTED)
    if record is None:
        return None
    run_id = record.dagster_run.run_id
    # Without its code server Dagster marks a run, without a signal to its process.
    with suppress(DagsterRebalanceError):
        ground.parts.dagster.ui.cancel(run_id)
    return run_id


def _has_ended(ground: Ground, run_id: str) -> Callable[[], bool]:
    def has_ended() -> bool:
        with suppress(Exception):  # any error of Dagster's storage during an outage
            run = ground.parts.instance.get_run_by_id(run_id)
            return run is None or run.is_finished
        return False

    return has_ended


def _live(ground: Ground) -> list[dg.DagsterRun]:
    runs = ground.parts.instance.get_runs(dg.RunsFilter(tags={GROUP_TAG: GROUP}), limit=100)
    return [run for run in runs if run.status not in _OVER]
