"""Runs that are deleted while they work: what is known of them, by whoever looks.

On a real instance; nothing is launched.
"""

from __future__ import annotations

import multiprocessing

import dagster as dg
import pytest

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.run import RunSeen, RunState
from dagster_rebalance.orchestration.runs.heartbeat import Heartbeat
from dagster_rebalance.orchestration.runs.queries import RunLedger
from dagster_rebalance.orchestration.storage import range_owners
from dagster_rebalance.orchestration.storage.range_owners import RangeOwner, RangeOwners
from tests.orchestration.parts import EACH_STORAGE, batch_request, make_run, span

Status = dg.DagsterRunStatus


@pytest.fixture(params=EACH_STORAGE)
def instance(request: pytest.FixtureRequest) -> dg.DagsterInstance:
    """One after the other."""
    found: dg.DagsterInstance = request.getfixturevalue(request.param)
    return found


def look(
    instance: dg.DagsterInstance, batch_id: str, ledger: RunLedger | None = None, *partitions: int
) -> tuple[RunSeen, ...]:
    """What an owner of partitions finds that has never seen the run in Dagster."""
    claims = [(batch_id, span(number)) for number in partitions or (0,)]
    return (ledger or RunLedger(instance, "etl")).read([batch_id], live_too=True, claims=claims)


def at_work(
    instance: dg.DagsterInstance, batch_id: str, *partitions: int
) -> tuple[dg.DagsterRun, Heartbeat]:
    """A run of this very process that has looked whether it may work."""
    spans = [span(number) for number in partitions or (0,)]
    run = make_run(instance, batch_request(batch_id, *spans), Status.STARTED)
    heartbeat = Heartbeat(instance, run, timeout_s=1000.0)
    heartbeat.begin()
    heartbeat.note_work([(batch_id, range_) for range_ in spans])
    return run, heartbeat


def test_a_run_that_is_deleted_while_it_works_is_found_by_its_note(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """By the next owner, too: it must not begin beside the process."""
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


def test_a_run_that_began_and_was_deleted_since_the_last_look_is_not_ended(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """Its member took it for one that never began; the next look finds it by its note."""
    run, _ = at_work(instance, batch_id)
    instance.delete_run(run.run_id)
    stopped: list[str] = []
    ledger = RunLedger(instance, "etl", stop_work=stopped.append)
    assert not ledger.end_dead(run.run_id, "")
    assert stopped == []
    assert [
        seen.run_id for seen in look(instance, batch_id, ledger) if seen.batch_id == batch_id
    ] == [run.run_id]


def test_the_end_of_a_deleted_run_is_remembered(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """Whoever ends it says so to the next owner, after its Spark work was stopped."""
    run, _ = at_work(instance, batch_id)
    instance.delete_run(run.run_id)
    stopped: list[str] = []
    ledger = RunLedger(instance, "etl", stop_work=stopped.append)
    look(instance, batch_id, ledger)
    assert ledger.end_dead(run.run_id, "")
    assert stopped == [run.run_id]
    assert [seen for seen in look(instance, batch_id) if seen.batch_id == batch_id] == []


def test_a_deleted_run_that_says_that_it_is_finished_is_not_waited_for(
    instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no log any more that a mark could stand in."""
    run, heartbeat = at_work(instance, batch_id)
    instance.delete_run(run.run_id)
    heartbeat._finished.set()
    monkeypatch.setattr(heartbeat, "_pause", lambda: None)
    heartbeat._turn(instance)
    (seen,) = [seen for seen in look(instance, batch_id) if seen.batch_id == batch_id]
    assert (seen.is_gone, seen.is_over) == (True, False)


def _work(ref: dg.InstanceRef, run_id: str, batch_id: str) -> None:
    """A run in a process of its own that ends without a word."""
    with dg.DagsterInstance.from_ref(ref) as instance:
        run = instance.get_run_by_id(run_id)
        assert run is not None
        heartbeat = Heartbeat(instance, run, timeout_s=1000.0)
        heartbeat.begin()
        heartbeat.note_work([(batch_id, span(0))])


def test_a_deleted_run_whose_process_is_gone_is_not_waited_for(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """Where the process can be looked up, nobody waits for the time-out.

    A person may delete a dead run and go on at once.
    """
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    process = multiprocessing.get_context("spawn").Process(
        target=_work, args=(instance.get_ref(), run.run_id, batch_id)
    )
    process.start()
    process.join(120)
    assert process.exitcode == 0
    instance.delete_run(run.run_id)
    (seen,) = [seen for seen in look(instance, batch_id) if seen.batch_id == batch_id]
    assert (seen.state, seen.is_gone, seen.is_over) == (RunState.DELETED, True, False)


def test_a_run_that_is_deleted_before_its_note_is_there_does_not_work(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """Nobody would know of it."""
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    heartbeat = Heartbeat(instance, run, timeout_s=1000.0)
    heartbeat.begin()
    instance.delete_run(run.run_id)
    with pytest.raises(IllegalStateError, match="is not in Dagster any more"):
        heartbeat.note_work([(batch_id, span(0))])


def test_a_run_that_was_taken_for_dead_leaves_the_note_of_its_successor(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """It wakes up beside that one, which would not be found any more if it were deleted."""
    notes, claims = RangeOwners(instance), [(batch_id, span(number)) for number in range(2)]
    notes.write(RangeOwner("first", 1, is_finished=False), claims)
    notes.finish("first", 1, claims)
    assert [note.is_finished for note in notes.read(claims).values()] == [True, True]
    second = RangeOwner("second", 2, is_finished=False)
    notes.write(second, claims)
    notes.finish("first", 1, claims)
    assert list(notes.read(claims).values()) == [second, second]


def test_a_process_that_resumes_a_run_does_not_work(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """Dagster starts it beside what the first one has left, on Spark say, and nobody ends that."""
    run, _ = at_work(instance, batch_id)
    with pytest.raises(IllegalStateError, match="was resumed, and its first process may have left"):
        Heartbeat(instance, run, timeout_s=1000.0).begin()
    (seen,) = [seen for seen in look(instance, batch_id) if seen.batch_id == batch_id]
    assert seen.heartbeat.startswith("0/"), "no sign that would keep it from being found dead"


def test_a_note_is_complete_although_some_of_its_places_were_used(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """On SQLite, Dagster writes nothing new together with something old, and says nothing."""
    notes, claims = RangeOwners(instance), [(batch_id, span(number)) for number in range(6)]
    notes.write(RangeOwner("old", 1, is_finished=False), claims[1:3])
    notes.write(RangeOwner("new", 2, is_finished=False), claims)
    assert [note.run_id for note in notes.read(claims).values()] == ["new"] * 6


def test_notes_share_places_and_are_not_taken_for_each_other(
    instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can delete them; a later run on another range takes the place."""
    monkeypatch.setattr(range_owners, "PLACES", 1)
    notes = RangeOwners(instance)
    notes.write(RangeOwner("old", 1, is_finished=False), [(batch_id, span(0))])
    notes.write(RangeOwner("new", 2, is_finished=False), [(batch_id, span(1)), (batch_id, span(2))])
    claims = [(batch_id, span(number)) for number in range(3)]
    assert {claim[1]: note.run_id for claim, note in notes.read(claims).items()} == {
        span(1): "new",
        span(2): "new",
    }
    notes.erase("old", claims)
    assert len(notes.read(claims)) == 2
    notes.erase("new", claims)
    assert notes.read(claims) == {}
