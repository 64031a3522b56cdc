"""Runs that are deleted while they work are found as the owners of their ranges."""

from __future__ import annotations

import multiprocessing

import dagster as dg
import pytest

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.orchestration.runs.heartbeat import Heartbeat
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage import key_values
from dagster_rebalance.orchestration.storage.key_values import KeyValues
from dagster_rebalance.orchestration.storage.range_owners import (
    ProcessingRun,
    RangeOwners,
    _owner_key,
)
from tests.orchestration.parts import EACH_STORAGE, batch_request, make_run, span

Status = dg.DagsterRunStatus


@pytest.fixture(params=EACH_STORAGE)
def instance(request: pytest.FixtureRequest) -> dg.DagsterInstance:
    found: dg.DagsterInstance = request.getfixturevalue(request.param)
    return found


def look(
    instance: dg.DagsterInstance, batch_id: str, ledger: RunLedger | None = None, *partitions: int
) -> tuple[RunSnapshot, ...]:
    claims = [(batch_id, span(number)) for number in partitions or (0,)]
    return (ledger or RunLedger(instance, "etl")).read([batch_id], with_live=True, claims=claims)


def at_work(
    instance: dg.DagsterInstance, batch_id: str, *partitions: int
) -> tuple[dg.DagsterRun, Heartbeat]:
    spans = [span(number) for number in partitions or (0,)]
    run = make_run(instance, batch_request(batch_id, *spans), Status.STARTED)
    heartbeat = Heartbeat(instance, run, timeout_s=1000.0)
    heartbeat.begin()
    heartbeat.record_claims([(batch_id, range_) for range_ in spans])
    return run, heartbeat


def test_deleted_run_is_found_as_range_owner(instance: dg.DagsterInstance, batch_id: str) -> None:
    run, _ = at_work(instance, batch_id, 0, 1)
    assert [seen.state for seen in look(instance, batch_id) if seen.batch_id == batch_id] == [
        RunState.STARTED
    ]
    instance.delete_run(run.run_id)
    (seen,) = [seen for seen in look(instance, batch_id, None, 0, 1) if seen.batch_id == batch_id]
    assert (seen.run_id, seen.ranges, seen.state) == (
        run.run_id,
        (span(0), span(1)),
        RunState.DELETED,
    )
    assert (seen.is_live, seen.has_begun, seen.is_gone, seen.is_over) == (True, True, False, False)


def test_run_that_began_and_was_deleted_since_last_read_is_not_ended(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    run, _ = at_work(instance, batch_id)
    instance.delete_run(run.run_id)
    stopped: list[str] = []
    ledger = RunLedger(instance, "etl", stop_work=stopped.append)
    assert not ledger.end_dead(run.run_id, "")
    assert stopped == []
    assert [
        seen.run_id for seen in look(instance, batch_id, ledger) if seen.batch_id == batch_id
    ] == [run.run_id]


def test_end_of_deleted_run_is_recorded(instance: dg.DagsterInstance, batch_id: str) -> None:
    run, _ = at_work(instance, batch_id)
    instance.delete_run(run.run_id)
    stopped: list[str] = []
    ledger = RunLedger(instance, "etl", stop_work=stopped.append)
    look(instance, batch_id, ledger)
    assert ledger.end_dead(run.run_id, "")
    assert stopped == [run.run_id]
    assert [seen for seen in look(instance, batch_id) if seen.batch_id == batch_id] == []


def test_deleted_run_records_that_it_is_finished(
    instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no log for a run event."""
    run, heartbeat = at_work(instance, batch_id)
    instance.delete_run(run.run_id)
    heartbeat._finished.set()
    monkeypatch.setattr(heartbeat, "_pause", lambda: None)
    heartbeat._step(instance)
    (seen,) = [seen for seen in look(instance, batch_id) if seen.batch_id == batch_id]
    assert (seen.is_gone, seen.is_over) == (True, False)


def _work(ref: dg.InstanceRef, run_id: str, batch_id: str) -> None:
    with dg.DagsterInstance.from_ref(ref) as instance:
        run = instance.get_run_by_id(run_id)
        assert run is not None
        heartbeat = Heartbeat(instance, run, timeout_s=1000.0)
        heartbeat.begin()
        heartbeat.record_claims([(batch_id, span(0))])


def test_deleted_run_without_process_is_gone(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun
) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_work, args=(instance.get_ref(), run.run_id, batch_id)
    )
    process.start()
    process.join()  # it imports Dagster, for minutes with a low priority
    assert process.exitcode == 0
    instance.delete_run(run.run_id)
    (seen,) = [seen for seen in look(instance, batch_id) if seen.batch_id == batch_id]
    assert (seen.state, seen.is_gone, seen.is_over) == (RunState.DELETED, True, False)


def test_run_deleted_before_claims_are_recorded_does_not_work(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun
) -> None:
    heartbeat = Heartbeat(instance, run, timeout_s=1000.0)
    heartbeat.begin()
    instance.delete_run(run.run_id)
    with pytest.raises(IllegalStateError, match="no longer exists in Dagster"):
        heartbeat.record_claims([(batch_id, span(0))])


def test_run_considered_dead_keeps_record_of_its_successor(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    notes, claims = RangeOwners(instance), [(batch_id, span(number)) for number in range(2)]
    notes.begin("first", 1, claims)
    notes.finish("first", 1, claims)
    assert [note.is_finished for note in notes.read(claims).values()] == [True, True]
    notes.begin("second", 2, claims)
    notes.finish("first", 1, claims)
    assert list(notes.read(claims).values()) == [ProcessingRun("second", 2, is_finished=False)] * 2


def test_process_of_resumed_run_does_not_work(instance: dg.DagsterInstance, batch_id: str) -> None:
    """The first process may have left Spark jobs."""
    run, _ = at_work(instance, batch_id)
    with pytest.raises(IllegalStateError, match="was resumed, and its first process may have left"):
        Heartbeat(instance, run, timeout_s=1000.0).begin()
    (seen,) = [seen for seen in look(instance, batch_id) if seen.batch_id == batch_id]
    assert seen.heartbeat.startswith("0/"), "no sign that would keep it from being found dead"


def test_range_owner_is_complete_if_some_keys_exist(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """On SQLite, Dagster drops new keys from a write with known ones."""
    notes, claims = RangeOwners(instance), [(batch_id, span(number)) for number in range(6)]
    notes.begin("old", 1, claims[1:3])
    notes.begin("new", 2, claims)
    assert [note.run_id for note in notes.read(claims).values()] == ["new"] * 6


def test_range_owners_that_share_a_slot_are_distinguished(
    instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_values, "SLOTS", 1)
    notes = RangeOwners(instance)
    notes.begin("old", 1, [(batch_id, span(0))])
    notes.begin("new", 2, [(batch_id, span(1)), (batch_id, span(2))])
    claims = [(batch_id, span(number)) for number in range(3)]
    assert {claim[1]: note.run_id for claim, note in notes.read(claims).items()} == {
        span(1): "new",
        span(2): "new",
    }
    notes.erase("old", claims)
    assert len(notes.read(claims)) == 2
    notes.erase("new", claims)
    assert notes.read(claims) == {}


def test_record_of_a_range_owner_does_not_grow_with_the_other_ranges_of_its_batch(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    claims = [(batch_id, span(number)) for number in range(100)]
    written = KeyValues(instance)

    def size() -> int:
        """The size of the slots, which have records of other tests, too."""
        return sum(map(len, written.read(map(_owner_key, claims)).values()))

    before = size()
    RangeOwners(instance).begin("run", 1, claims)
    assert 0 < size() - before < 100 * 100
    assert len(RangeOwners(instance).read(claims)) == 100


def test_deleted_run_with_many_ranges_is_asked_for_once(
    instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = at_work(instance, batch_id, *range(20))
    instance.delete_run(run.run_id)
    real, asked = instance.get_run_by_id, list[str]()

    def get_run_by_id(run_id: str) -> dg.DagsterRun | None:
        asked.append(run_id)
        return real(run_id)

    monkeypatch.setattr(instance, "get_run_by_id", get_run_by_id)
    (seen,) = [
        one for one in look(instance, batch_id, None, *range(20)) if one.batch_id == batch_id
    ]
    assert (len(seen.ranges), asked) == (20, [run.run_id])
