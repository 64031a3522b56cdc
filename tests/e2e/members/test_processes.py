"""Processes are killed, shut down and reloaded while runs are in flight."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from tests.e2e.stage import Group

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.stage import Stage

pytestmark = [pytest.mark.e2e, pytest.mark.broker]

TAKE_OVER_S = 240.0


@pytest.fixture
def restarted_blue(stage: Stage) -> Iterator[None]:
    """Start `blue` again after a test that ends its code server, also after a failure."""
    yield
    ended = stage.dagster.locations["blue"]
    ended.server.stop_at_once()
    ended.start(stage.dagster.home)
    ended.wait_until_ready()
    stage.dagster.ui.reload("blue")


def _in_flight(groups: list[Group], location: str, runs: int) -> None:
    for group in groups:
        group.turn_on(location)
    for group in groups:
        group.wait(f"{runs} runs to work", lambda group: len(group.working()) >= runs)


def test_batch_of_a_timed_out_tick_is_requested_once(stage: Stage) -> None:
    """Dagster drops the run requests of such a tick while the function continues."""
    groups = stage.groups("late", partitions=1)
    for group in groups:
        (group.folder / "slow").touch()
        group.open()
        group.turn_on("blue")
    for group in groups:
        group.wait(
            "a tick to time out",
            lambda group: any(tick["status"] == "FAILURE" for tick in group.ticks("blue")),
        )
        (group.folder / "slow").unlink()
    for group in groups:
        group.wait("all records to be committed", Group.is_done)
        assert len(group.runs()) == 1
        group.check_exactly_once()


@pytest.mark.usefixtures("restarted_blue")
def test_runs_of_a_killed_code_server_are_adopted_by_the_next_owner(stage: Stage) -> None:
    groups = stage.groups("killed")
    _in_flight(groups, "blue", 2)
    stage.dagster.locations["blue"].server.kill()
    for group in groups:
        group.turn_on("green")
    for group in groups:
        group.wait(
            "green to take over", lambda group: group.events("assigned", "green"), TAKE_OVER_S
        )
        group.open()
    for group in groups:
        group.wait("all records to be committed", Group.is_done)
        assert [run.status for run in group.runs()] == [dg.DagsterRunStatus.SUCCESS] * 2, (
            "both runs were adopted"
        )
        group.check_exactly_once()


@pytest.mark.usefixtures("restarted_blue")
def test_run_with_a_dead_process_is_repeated(stage: Stage) -> None:
    groups = stage.groups("dying", partitions=1)
    _in_flight(groups, "blue", 1)
    stage.dagster.locations["blue"].server.stop_at_once()
    for group in groups:
        group.open()
        group.turn_on("green")
    for group in groups:
        group.wait("all records to be committed", Group.is_done, TAKE_OVER_S)
        assert [run.status.value for run in group.runs()] == ["FAILURE", "SUCCESS"]
        assert len({run.tags["dagster_rebalance/batch"] for run in group.runs()}) == 1
        group.check_exactly_once()


@pytest.mark.usefixtures("restarted_blue")
def test_ctrl_c_waits_for_the_run_and_commits_it(stage: Stage) -> None:
    groups = stage.groups("interrupted", partitions=1)
    _in_flight(groups, "blue", 1)
    server = stage.dagster.locations["blue"].server
    server.send(signal.SIGINT)
    for group in groups:
        group.open()
    server.wait(TAKE_OVER_S)
    for group in groups:
        assert group.is_done(), (
            f"batches in flight are committed before the process ends: {group.state()}"
        )
        assert group.events("left", "blue")
        group.check_exactly_once()


def test_reloaded_code_location_adopts_the_runs_of_the_old_process(stage: Stage) -> None:
    groups = stage.groups("reloaded", partitions=2)
    _in_flight(groups, "purple", 1)
    stage.dagster.ui.reload("purple")
    for group in groups:
        group.wait(
            "the new process to join", lambda group: len(group.events("joined", "purple")) == 2
        )
        group.wait(
            "the old process to leave", lambda group: group.events("left", "purple"), TAKE_OVER_S
        )
        assert "newer process" in group.events("left", "purple")[0]["reason"]
        assert {event["outcome"] for event in group.events("hold", "purple")} == {"handed over"}
        assert not group.is_done(), "its run still works"
        group.open()
        group.produce([0, 1], 10)
    for group in groups:
        group.wait("all records to be committed", lambda group: group.is_done(20))
        group.check_exactly_once()
