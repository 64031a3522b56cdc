"""The deployment of the tests of streaming runs: one code location with all groups."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.deployment import AT_ONCE, CodeLocation, DagsterDeployment
from tests.e2e.stage import PROJECT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster

DETACHED = "detached_consumer"
END_LIMIT_S = 150.0


@pytest.fixture(scope="package")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder through which tests steer the runs; a file `version` has that of the code."""
    folder = tmp_path_factory.mktemp("streaming")
    for name in ("forms", "pipes", "reruns", "runs"):
        (folder / name).mkdir()
    for versioned in (folder, folder / "reruns"):
        (versioned / "version").write_text("v1")
    return folder


@pytest.fixture(scope="package")
def dagster(kafka_broker: KafkaCluster, root: Path) -> Iterator[DagsterDeployment]:
    """A deployment whose code server can load new code.

    The runs of the job `DETACHED` share only Dagster's storage with it. All others are processes of
    the code server.
    """
    env = {"E2E_ROOT": str(root), "KAFKA_BROKERS": kafka_broker.bootstrap_servers}
    location = CodeLocation("shop", "streaming_project", PROJECT, env, reloads=True)
    launcher = {
        "module": "tests.e2e.streaming.launcher",
        "class": "LauncherByJob",
        "config": {"job": DETACHED, "env": env, "folder": str(root / "runs")},
    }
    settings = {**AT_ONCE, "run_launcher": launcher}
    with DagsterDeployment(root / "home", [location], settings=settings) as deployment:
        yield deployment


@pytest.fixture(autouse=True)
def stopped_groups(dagster: DagsterDeployment) -> Iterator[None]:
    """After each test, turn all sensors off and end all runs."""
    yield
    with dagster.instance() as instance:
        for state in instance.all_instigator_state():
            if state.is_running:
                dagster.ui.stop_sensor("shop", state.instigator_name)

        def have_ended() -> bool:
            live = _live(instance)
            for run in live:
                with suppress(DagsterRebalanceError):  # it ends already, or has not started yet
                    dagster.ui.cancel(run.run_id)
            return not live

        try:
            wait_until(have_ended, timeout_s=END_LIMIT_S, what="all runs to end", interval_s=0.2)
        except DagsterRebalanceError:
            # A process that ended during its cancellation leaves a run that no sensor ends any
            # more. The next tests must not wait for it, nor for one that fails this test.
            left = _live(instance)
            for run in left:
                instance.report_run_failed(run, "its test is over")
            assert {run.status for run in left} <= {dg.DagsterRunStatus.CANCELING}


def _live(instance: dg.DagsterInstance) -> list[dg.DagsterRun]:
    return [run for run in instance.get_runs() if not run.is_finished]
