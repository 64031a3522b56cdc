"""Only runs of the jobs of a group count: tags can be copied, and set in the launchpad."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.runs.progress import InFlight, Succeeded, ToRequest, progress_of
from dagster_rebalance.core.runs.run_index import RunIndex
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.dynamic_partitions import JobName
from dagster_rebalance.testing.fixtures import unique_name
from tests.orchestration.parts import batch_request, make_run, span

if TYPE_CHECKING:
    from dagster_rebalance.core.runs.progress import Progress

MINE = JobName("r", "idle_job")


@pytest.fixture
def group_id() -> str:
    return unique_name("group")


def progress(
    instance: dg.DagsterInstance, group_id: str, batch_id: str, own_job: JobName | None = None
) -> Progress:
    return progress_of(
        span(0),
        batch_id,
        RunIndex(RunLedger(instance, group_id, own_job=own_job).read([batch_id])),
        max_attempts=3,
    )


def test_run_of_own_job_counts(instance: dg.DagsterInstance, group_id: str, batch_id: str) -> None:
    run = make_run(
        instance, batch_request(batch_id), dg.DagsterRunStatus.SUCCESS, group_id=group_id
    )
    assert progress(instance, group_id, batch_id, MINE) == Succeeded(run.run_id)


@pytest.mark.parametrize(
    "mine", [JobName("other", "idle_job"), JobName("r", "other"), JobName("", "idle_job")]
)
@pytest.mark.parametrize(
    "status",
    [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.STARTED],
)
def test_run_of_another_job_is_ignored(
    instance: dg.DagsterInstance,
    group_id: str,
    batch_id: str,
    mine: JobName,
    status: dg.DagsterRunStatus,
) -> None:
    """It would commit offsets, stop a partition, or hold it back."""
    make_run(instance, batch_request(batch_id), status, group_id=group_id)
    assert progress(instance, group_id, batch_id, mine) == ToRequest(1)
    assert RunLedger(instance, group_id, own_job=mine).read([], with_live=True) == ()


def test_run_of_another_group_is_ignored(
    instance: dg.DagsterInstance, group_id: str, batch_id: str
) -> None:
    make_run(instance, batch_request(batch_id), dg.DagsterRunStatus.SUCCESS, group_id="other")
    assert progress(instance, group_id, batch_id, MINE) == ToRequest(1)


def test_runs_of_renamed_job_are_adopted(
    instance: dg.DagsterInstance, group_id: str, batch_id: str
) -> None:
    RunLedger(instance, group_id, own_job=MINE).read([])
    run = make_run(
        instance, batch_request(batch_id), dg.DagsterRunStatus.SUCCESS, group_id=group_id
    )
    assert progress(instance, group_id, batch_id, JobName("r", "renamed")) == Succeeded(run.run_id)
    assert progress(instance, group_id, batch_id) == Succeeded(run.run_id)


@pytest.mark.parametrize(
    "status", [dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.SUCCESS]
)
def test_same_job_counts_in_all_code_locations(
    instance: dg.DagsterInstance, group_id: str, batch_id: str, status: dg.DagsterRunStatus
) -> None:
    """A member of 0.1.0 records no job."""
    RunLedger(instance, group_id, own_job=MINE).read([])
    run = make_run(instance, batch_request(batch_id), status, group_id=group_id, location="green")
    found = progress(instance, group_id, batch_id, MINE)
    assert (
        found == Succeeded(run.run_id)
        if status is dg.DagsterRunStatus.SUCCESS
        else isinstance(found, InFlight)
    )
