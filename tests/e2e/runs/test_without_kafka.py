"""A real Dagster without Kafka: reading sensors, and ending runs.

Dagster's default launcher cancels a run by an event that its process must handle, and holds the
lock of the code server until then.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.orchestration.reporting.member_tables import sensors_of
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.heartbeats import Heartbeats
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.testing.deadline import wait_until

if TYPE_CHECKING:
    from dagster_rebalance.core.reporting.group_status import SensorState
    from dagster_rebalance.testing.deployment import DagsterDeployment
    from tests.e2e.stage import Stage

pytestmark = [pytest.mark.e2e, pytest.mark.broker]
_STATUS = dg.DagsterRunStatus
GROUP = GroupAssets.of("etl").group
_LIMIT_S = 240.0


@pytest.fixture
def dagster(shared_stage: Stage) -> DagsterDeployment:
    """The shared deployment, whose code servers start runs as processes."""
    return shared_stage.dagster


def report_joined(
    instance: dg.DagsterInstance, location: str, sensor: str, run_id: str = ""
) -> None:
    """Record a member that has joined."""
    metadata = {"event": "joined", **MemberIdentity(location, sensor, "1", run_id).names}
    instance.report_runless_asset_event(dg.AssetObservation(GROUP, metadata=metadata))


def test_sensors_of_a_group_are_read_with_their_last_tick(dagster: DagsterDeployment) -> None:
    with dagster.instance() as instance:
        report_joined(instance, "shop", "failing_sensor")
        assert not sensors_of(instance, GROUP), "it was never turned on"
        for name in ("failing_sensor", "skipping_sensor"):
            dagster.ui.start_sensor("shop", name)

        def failing() -> SensorState | None:
            (seen,) = sensors_of(instance, GROUP)
            return seen if seen.error else None

        seen = wait_until(failing, timeout_s=_LIMIT_S, what="a tick to fail")
        assert (seen.name, seen.is_on) == ("failing_sensor", True)
        assert seen.error.startswith(
            "KeyError: 'KAFKA_BROKERS is not set' (without_kafka_project.py:"
        )
        report_joined(instance, "another location", "skipping_sensor")
        report_joined(instance, "shop/1a2b3c4d", "skipping_sensor", run_id="1a2b3c4d")
        for name in ("failing_sensor", "skipping_sensor"):
            dagster.ui.stop_sensor("shop", name)
        first, second = sensors_of(instance, GROUP)
        names = ("failing_sensor", "skipping_sensor")
        assert (first.name, second.name, second.is_on) == (*names, False)
        assert second.error == ""


class WorkingRun:
    """A run that works until an interrupt."""

    def __init__(self, dagster: DagsterDeployment, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.run_id = dagster.ui.launch("shop", "working")
        # Then it writes nothing for ten seconds: a process that is suspended inside a write locks
        # SQLite for all others.
        at_work = dagster.home / self.run_id
        wait_until(lambda: at_work.exists() or None, timeout_s=_LIMIT_S, what="the run to work")

    @property
    def sign(self) -> str:
        """Its last heartbeat."""
        record = self.instance.get_run_record_by_id(self.run_id)
        number = {self.run_id: record.storage_id} if record else {}
        return Heartbeats(self.instance).read(number).get(self.run_id, "")

    @property
    def pid(self) -> int:
        """The pid of its process."""
        return int(self.sign.split(":")[-2])

    @property
    def status(self) -> dg.DagsterRunStatus:
        """Its status in Dagster."""
        run = self.instance.get_run_by_id(self.run_id)
        assert run is not None
        return run.status


def check_runs_start(dagster: DagsterDeployment) -> None:
    """Check that the code server still starts runs."""
    run = dagster.wait_for_run(dagster.ui.launch("shop", "quick"), timeout_s=_LIMIT_S)
    assert run.status is _STATUS.SUCCESS


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_ended_dead_run_does_not_block_its_code_server(
    dagster: DagsterDeployment, how: signal.Signals
) -> None:
    with dagster.instance() as instance:
        run = WorkingRun(dagster, instance)
        pid = run.pid
        os.kill(pid, how)
        assert RunLedger(instance, "etl").end_dead(run.run_id, run.sign)
        assert run.status is _STATUS.FAILURE
        check_runs_start(dagster)
        wait_until(
            lambda: not Path(f"/proc/{pid}").exists() or None,
            timeout_s=_LIMIT_S,
            what="the process to be gone",
        )


def test_cancelled_suspended_run_does_not_block_its_code_server(
    dagster: DagsterDeployment,
) -> None:
    with dagster.instance() as instance:
        run = WorkingRun(dagster, instance)
        os.kill(run.pid, signal.SIGSTOP)
        RunLedger(instance, "etl").cancel(run.run_id)
        check_runs_start(dagster)
        os.kill(run.pid, signal.SIGCONT)
        assert dagster.wait_for_run(run.run_id, timeout_s=_LIMIT_S).status is _STATUS.CANCELED
