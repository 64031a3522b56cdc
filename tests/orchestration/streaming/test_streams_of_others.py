"""Claims that name a streaming run of another owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.core.runs.retry import FailedAttempt
from dagster_rebalance.core.runs.stream_batch import BatchOutcome, StreamBatch
from dagster_rebalance.orchestration.runs import process
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.failure_notes import FailureNotes
from dagster_rebalance.orchestration.storage.range_owners import StreamingRunRecords
from dagster_rebalance.orchestration.storage.run_tags import STREAM_TAG, RunEvent, record_run_event
from tests.orchestration.parts import (
    EACH_STORAGE,
    batch_request,
    give_sign,
    make_run,
    span,
    status_of,
)

if TYPE_CHECKING:
    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot

Status = dg.DagsterRunStatus
GONE = "elsewhere:1:1"


@pytest.fixture(params=EACH_STORAGE)
def instance(request: pytest.FixtureRequest) -> dg.DagsterInstance:
    made: dg.DagsterInstance = request.getfixturevalue(request.param)
    return made


class Other:
    def __init__(self, instance: dg.DagsterInstance, attempt: int = 2) -> None:
        self.instance = instance
        self.run = make_run(
            instance, batch_request("none"), Status.STARTED, tags={STREAM_TAG: "green:stream"}
        )
        record = instance.get_run_record_by_id(self.run.run_id)
        assert record is not None
        StreamingRunRecords(instance).record_storage_id(self.run.run_id, record.storage_id)
        record_run_event(instance, self.run, RunEvent.BEGAN)
        give_sign(instance, self.run, f"1 {GONE}")
        self.claim: Claimed = (str(StreamBatch(self.run.run_id, 7, attempt)), span(0))

    def seen(self) -> tuple[RunSnapshot, ...]:
        return RunLedger(self.instance, "etl").read([self.claim[0]], claims=[self.claim])


@pytest.fixture
def other(instance: dg.DagsterInstance) -> Other:
    return Other(instance)


def test_batch_of_a_live_streaming_run_is_at_work(other: Other) -> None:
    before, now = other.seen()
    assert (before.state, before.attempt, before.is_live) == (RunState.FAILED, 1, False)
    assert (now.state, now.attempt, now.is_live) == (RunState.STARTED, 2, True)
    assert now.ranges == (span(0),)
    assert now.heartbeat == f"1 {GONE}"


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (BatchOutcome.SUCCEEDED, RunState.SUCCEEDED),
        (BatchOutcome.FAILED, RunState.FAILED),
        (BatchOutcome.INTERRUPTED, RunState.CANCELED),
    ],
)
def test_recorded_outcome_of_a_live_run_counts(
    other: Other, outcome: BatchOutcome, state: RunState
) -> None:
    StreamingRunRecords(other.instance).record({other.claim: outcome})
    assert [run.state for run in other.seen()][-1] is state
    assert not other.seen()[-1].is_live


def test_error_is_known_after_another_run_has_claimed_the_range(other: Other) -> None:
    """A deploy replaces the run that failed."""
    failed = FailedAttempt("old-run", 1, "ValueError: no price")
    notes = FailureNotes(other.instance, "etl")
    notes.write([span(0), span(1)], failed)
    notes.write([span(1)], FailedAttempt("old-run", 2, "ValueError: no currency"))
    before, now = other.seen()
    assert (before.run_id, before.error) == ("old-run", "ValueError: no price")
    assert (now.run_id, now.error) == (other.run.run_id, "")
    assert notes.read([span(0), span(2)]) == {span(0): failed}
    assert not FailureNotes(other.instance, "another group").read([span(0)])


def test_ended_streaming_run_is_over_only_with_proof(other: Other) -> None:
    other.instance.report_run_failed(other.run)
    assert other.seen()[-1].is_live
    record_run_event(other.instance, other.run, RunEvent.FINISHED)
    assert other.seen()[-1].is_gone
    record_run_event(other.instance, other.run, RunEvent.OVER)
    assert (other.seen()[-1].state, other.seen()[-1].is_live) == (RunState.FAILED, False)


def test_cancelled_streaming_run_has_dropped_its_claim(other: Other) -> None:
    other.instance.report_run_canceled(other.run)
    record_run_event(other.instance, other.run, RunEvent.OVER)
    last = other.seen()[-1]
    assert (last.state, last.is_cancelled_by_member, last.is_live) == (
        RunState.CANCELED,
        True,
        False,
    )


def test_deleted_streaming_run_that_sends_heartbeats_is_live(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.instance.delete_run(other.run.run_id)
    last = other.seen()[-1]
    assert (last.state, last.is_live, last.is_gone) == (RunState.DELETED, True, False)
    monkeypatch.setattr(process, "is_gone", lambda *_: True)
    monkeypatch.setattr("dagster_rebalance.orchestration.runs.run_ledger.is_gone", lambda *_: True)
    assert other.seen()[-1].is_gone


def test_deleted_streaming_run_whose_process_is_gone_is_ended_once(other: Other) -> None:
    other.instance.delete_run(other.run.run_id)
    ledger = RunLedger(other.instance, "etl")
    assert not ledger.end_dead(other.run.run_id, "an older sign"), "it lives"
    assert ledger.end_dead(other.run.run_id, f"1 {GONE}")
    assert (other.seen()[-1].state, other.seen()[-1].is_live) == (RunState.FAILED, False)


def test_unknown_streaming_run_does_not_work(instance: dg.DagsterInstance) -> None:
    claim = (str(StreamBatch("11111111-2222-3333-4444-555555555555", 1)), span(0))
    (run,) = RunLedger(instance, "etl").read([claim[0]], claims=[claim])
    assert (run.state, run.is_live) == (RunState.FAILED, False)


def test_streaming_run_is_not_cancelled_for_one_partition(other: Other) -> None:
    RunLedger(other.instance, "etl").cancel(other.run.run_id)
    assert status_of(other.instance, other.run) is Status.STARTED


def test_notes_of_several_claims_in_one_place_do_not_mix(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_rebalance.orchestration.storage.key_values.SLOTS", 1)
    notes = StreamingRunRecords(instance)
    first, second = ("s.r1.1.1", span(0)), ("s.r1.1.1", span(1))
    notes.record({first: BatchOutcome.FAILED, second: BatchOutcome.FAILED})
    notes.record({second: BatchOutcome.INTERRUPTED})
    assert notes.read([first, second]) == {
        first: BatchOutcome.FAILED,
        second: BatchOutcome.INTERRUPTED,
    }
    notes.record({first: BatchOutcome.DROPPED})
    assert notes.read([first]) == {first: BatchOutcome.FAILED}, (
        "a batch that was not begun has no note"
    )
    notes.record_start("r1", "s.r1.1.1", 1e9)
    assert notes.start_times(["r1"]) == {"s.r1.1.1": 1e9}
    assert notes.start_times(["r2"]) == {}, "the place belongs to another run"
    notes.record_storage_id("r1", 5)
    assert notes.storage_id("r1") == 5
    assert notes.storage_id("r2") is None
