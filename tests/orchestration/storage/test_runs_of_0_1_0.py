"""Runs of 0.1.0 during an upgrade have tags in place of heartbeats and run events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.run_tags import RunEvent, record_run_event
from tests.orchestration.parts import batch_request, make_run

if TYPE_CHECKING:
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot

Status = dg.DagsterRunStatus
HEARTBEAT = "dagster_rebalance/heartbeat"


def look(instance: dg.DagsterInstance, batch_id: str) -> RunSnapshot:
    return RunLedger(instance, "etl").read([batch_id])[-1]


def beat(instance: dg.DagsterInstance, run: dg.DagsterRun, later_s: int = 0) -> None:
    instance.add_run_tags(run.run_id, {HEARTBEAT: f"{time.time() + later_s:.0f}"})


def test_heartbeat_tag_of_0_1_0_is_read(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun
) -> None:
    assert look(instance, batch_id).heartbeat == ""
    beat(instance, run)
    first = look(instance, batch_id)
    beat(instance, run, later_s=10)
    assert first.has_begun
    assert look(instance, batch_id).heartbeat not in {"", first.heartbeat}


@pytest.mark.parametrize("end", ["report_run_failed", "report_run_canceled"])
def test_run_of_0_1_0_that_ended_in_dagster_is_not_over(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun, end: str
) -> None:
    beat(instance, run)
    getattr(instance, end)(run)
    seen = look(instance, batch_id)
    assert (seen.is_over, seen.is_live, seen.is_gone) == (False, True, False)
    record_run_event(instance, run, RunEvent.OVER)
    assert not look(instance, batch_id).is_live


def test_retry_ignores_copied_heartbeat_tag_of_0_1_0(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun
) -> None:
    beat(instance, run, later_s=-60)
    instance.report_run_failed(run)
    parent = instance.get_run_by_id(run.run_id)
    make_run(instance, batch_request(batch_id), Status.STARTED, parent=parent)
    assert not look(instance, batch_id).has_begun


def test_taken_back_tag_of_0_1_0_is_read(instance: dg.DagsterInstance, batch_id: str) -> None:
    run = make_run(instance, batch_request(batch_id), Status.CANCELED)
    assert not look(instance, batch_id).is_cancelled_by_member
    instance.add_run_tags(run.run_id, {"dagster_rebalance/taken_back": run.run_id})
    assert look(instance, batch_id).is_cancelled_by_member
