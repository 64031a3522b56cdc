"""Hand-overs between two code locations with live runs, in both protocols."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from tests.e2e.stage import Group, partitions_of
from tests.kafka.eviction import evict

if TYPE_CHECKING:
    from tests.e2e.stage import Stage

pytestmark = [pytest.mark.e2e, pytest.mark.broker]


def _in_flight(groups: list[Group], runs: int) -> None:
    for group in groups:
        group.turn_on("blue")
    for group in groups:
        group.wait(f"{runs} runs to work", lambda group: len(group.working()) >= runs)


def _green_joins(groups: list[Group]) -> None:
    for group in groups:
        group.turn_on("green")
    for group in groups:
        group.wait("green to join", lambda group: group.events("joined", "green"))


def _is_holding(group: Group) -> bool:
    ticks = group.ticks("blue")
    return any("holding" in (tick["skipReason"] or "") for tick in ticks[:2])


def test_hold_is_released_when_its_run_has_succeeded(stage: Stage) -> None:
    groups = stage.groups("handover")
    _in_flight(groups, 2)
    _green_joins(groups)
    for group in groups:
        group.wait("blue to hold", _is_holding)
        assert group.committed() == {0: 0, 1: 0}
        group.open()
    for group in groups:
        group.wait("a receipt", lambda group: group.holds("blue"))
        hold = group.holds("blue")[0]
        assert hold["outcome"] == "drained"
        assert len(partitions_of(hold)) == 1
        assert hold["runs"]
        group.produce([0, 1], 10)
        group.wait("all records to be committed", lambda group: group.is_done(20))
        assert group.committers() == {"blue", "green"}
        group.check_exactly_once()


def test_hold_cancels_queued_runs(stage: Stage) -> None:
    groups = stage.groups("queued")
    for group in groups:
        group.turn_on("blue")
    for group in groups:
        group.wait(
            "one run to work and one to be queued",
            lambda group: (
                sorted(run.status.value for run in group.runs()) == ["QUEUED", "STARTED"]
                and group.working()
            ),
        )
    _green_joins(groups)
    for group in groups:
        group.wait(
            "the revoke to reach a run", lambda group: _is_holding(group) or group.holds("blue")
        )
        group.open()
    for group in groups:
        group.wait("all records to be committed", Group.is_done)
        group.check_exactly_once()


def test_hold_without_work_is_released_at_once(stage: Stage) -> None:
    groups = stage.groups("idle")
    for group in groups:
        group.open()
        group.turn_on("blue")
    for group in groups:
        group.wait("all records to be committed", Group.is_done)
    _green_joins(groups)
    for group in groups:
        group.wait("a receipt", lambda group: group.holds("blue"))
        hold = group.holds("blue")[0]
        assert hold["outcome"] == "nothing to do"
        assert hold["seconds"] < 10


def test_hold_at_its_deadline_cancels_runs_for_the_next_owner(
    stage: Stage,
) -> None:
    """The next owner processes the range with the same bounds and batch id."""
    groups = stage.groups("deadline")
    # Both work: a run that only starts by the deadline cannot be cancelled, and is adopted.
    _in_flight(groups, 2)
    _green_joins(groups)
    for group in groups:
        group.wait("a receipt", lambda group: group.holds("blue"))
        hold = group.holds("blue")[0]
        assert hold["outcome"] == "deadline"
        assert hold["cancelled"]
        assert group.committed() == {0: 0, 1: 0}
        # On a busy machine a run may take longer to end than the hold may last.
        group.wait(
            "a run to be cancelled",
            lambda group: dg.DagsterRunStatus.CANCELED in {run.status for run in group.runs()},
        )
        group.open()
    for group in groups:
        group.wait("all records to be committed", Group.is_done)
        cancelled = [run for run in group.runs() if run.status is dg.DagsterRunStatus.CANCELED]
        assert cancelled
        done = {
            run.tags["dagster_rebalance/batch"]
            for run in group.runs()
            if run.status is dg.DagsterRunStatus.SUCCESS
        }
        assert {run.tags["dagster_rebalance/batch"] for run in cancelled} <= done, (
            "the same batch was requested again"
        )
        group.check_exactly_once()


def test_member_fenced_during_a_hold_commits_nothing(stage: Stage) -> None:
    """The member's probes detect the loss. The next owner adopts its runs."""
    groups = stage.groups("fenced")
    _in_flight(groups, 2)
    _green_joins(groups)
    for group in groups:
        group.wait("blue to hold", _is_holding)
        evict(stage.kafka.bootstrap_servers, group.name, _member_id(group, "blue"), group.protocol)
    for group in groups:
        group.wait(
            "the loss to be noticed",
            lambda group: any(hold["outcome"] == "lost" for hold in group.holds("blue")),
        )
        assert group.committed() == {0: 0, 1: 0}
        group.open()
    for group in groups:
        group.wait("all records to be committed", Group.is_done)
        assert len(group.runs()) == 2, "every run was adopted"
        group.check_exactly_once()


def _member_id(group: Group, location: str) -> str:
    return str(group.events("assigned", location)[-1]["member_id"])


def _has_ticked_since(ticks: int, group: Group) -> bool:
    return len(group.ticks("blue")) > ticks


def test_partition_added_during_a_hold_is_processed_after_it(stage: Stage) -> None:
    """With the classic protocol a metadata change would supersede the hold."""
    groups = stage.groups("grown")
    _in_flight(groups, 2)
    _green_joins(groups)
    for group in groups:
        group.wait("blue to hold", _is_holding)
        stage.kafka.add_partitions(group.name, 3)
        group.produce([2], 10)
    for group in groups:
        ticks = len(group.ticks("blue"))
        group.wait("a later tick", partial(_has_ticked_since, ticks))
        assert not [hold for hold in group.holds("blue") if hold["outcome"] != "nothing to do"]
        group.open()
    for group in groups:
        group.wait("all records, those of the new partition too, to be committed", Group.is_done)
        assert "superseded" not in {hold["outcome"] for hold in group.holds("blue")}
        group.check_exactly_once()
