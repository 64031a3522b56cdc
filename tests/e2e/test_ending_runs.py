"""Runs of a real code server are ended, and the code server goes on starting others.

Dagster's default launcher cancels a run by an event that its process must take, and holds the lock
of the code server for as long as that takes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.heartbeats import Heartbeats
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.deployment import CodeLocation, DagsterDeployment

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e
_STATUS = dg.DagsterRunStatus
_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def dagster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterDeployment]:
    """One code location, whose runs its code server starts as processes."""
    folder = Path(__file__).parent / "project"
    home = tmp_path_factory.mktemp("ending") / "home"
    with DagsterDeployment(home, [CodeLocation("shop", "endable_project", folder)]) as deployment:
        yield deployment


class Working:
    """A run that works."""

    def __init__(self, dagster: DagsterDeployment, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.run_id = dagster.ui.launch("shop", "working")
        # From then on it writes nothing for ten seconds: a process that is frozen while it writes
        # locks SQLite for all others.
        at_work = dagster.home / self.run_id
        wait_until(lambda: at_work.exists() or None, timeout_s=_LIMIT_S, what="the run to work")

    @property
    def sign(self) -> str:
        """Its last sign of life."""
        record = self.instance.get_run_record_by_id(self.run_id)
        number = {self.run_id: record.storage_id} if record else {}
        return Heartbeats(self.instance).read(number).get(self.run_id, "")

    @property
    def pid(self) -> int:
        """Its process."""
        return int(self.sign.split(":")[-2])

    @property
    def status(self) -> dg.DagsterRunStatus:
        """What Dagster shows."""
        run = self.instance.get_run_by_id(self.run_id)
        assert run is not None
        return run.status


def check_that_runs_start(dagster: DagsterDeployment) -> None:
    """Check that the code server still starts runs."""
    run = dagster.wait_for_run(dagster.ui.launch("shop", "quick"), timeout_s=_LIMIT_S)
    assert run.status is _STATUS.SUCCESS


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_dead_run_is_ended_and_its_code_server_starts_the_next_one(
    dagster: DagsterDeployment, how: signal.Signals
) -> None:
    with dagster.instance() as instance:
        run = Working(dagster, instance)
        pid = run.pid
        os.kill(pid, how)
        assert RunLedger(instance, "etl").end_dead(run.run_id, run.sign)
        assert run.status is _STATUS.FAILURE
        check_that_runs_start(dagster)
        wait_until(
            lambda: not Path(f"/proc/{pid}").exists() or None,
            timeout_s=_LIMIT_S,
            what="the process to be gone",
        )


def test_a_frozen_run_is_cancelled_and_its_code_server_starts_the_next_one(
    dagster: DagsterDeployment,
) -> None:
    with dagster.instance() as instance:
        run = Working(dagster, instance)
        os.kill(run.pid, signal.SIGSTOP)
        RunLedger(instance, "etl").cancel(run.run_id)
        check_that_runs_start(dagster)
        os.kill(run.pid, signal.SIGCONT)
        assert dagster.wait_for_run(run.run_id, timeout_s=_LIMIT_S).status is _STATUS.CANCELED
