"""The heartbeat of a run, in this very process: it is the process that is interrupted."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.runs.progress import Setback, setback_of
from dagster_rebalance.orchestration.runs import boot_clock
from dagster_rebalance.orchestration.runs import heartbeat as heartbeat_module
from dagster_rebalance.orchestration.runs.heartbeat import Heartbeat
from dagster_rebalance.orchestration.runs.queries import RunLedger
from dagster_rebalance.orchestration.storage.heartbeats import Heartbeats, spelled_partitions
from dagster_rebalance.orchestration.storage.run_events import (
    RunEvent,
    record_run_event,
    run_events_of,
)
from dagster_rebalance.testing.deadline import wait_until
from tests.orchestration.parts import batch_request, make_run, tp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.core.model.offsets import TopicPartition

Status = dg.DagsterRunStatus
PATIENT_S = 1000.0


@pytest.fixture
def interrupts() -> Iterator[list[int]]:
    """The SIGTERMs that this process got."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


INTERRUPTED = pytest.raises(dg.DagsterExecutionInterruptedError)
"""A run that was interrupted does not end as a success, also where the interrupt comes too late to
be heard."""


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and beats come often, however long a run has before it is taken for dead."""
    monkeypatch.setattr(heartbeat_module, "_LOOKS_PER_TIMEOUT", 100_000)
    monkeypatch.setattr(heartbeat_module, "_BEATS_PER_TIMEOUT", 100_000)


def begun(
    instance: dg.DagsterInstance, run: dg.DagsterRun, timeout_s: float = PATIENT_S
) -> Heartbeat:
    """The heartbeat of a run after its first sign of life."""
    heartbeat = Heartbeat(instance, run, timeout_s=timeout_s)
    heartbeat.begin()
    return heartbeat


def sign(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """The last sign of life of a run."""
    record = instance.get_run_record_by_id(run.run_id)
    assert record is not None
    return Heartbeats(instance).read({run.run_id: record.storage_id}).get(run.run_id, "")


def test_the_sign_of_life_changes_while_the_run_works(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """A sign that stays the same is what a dead process shows.

    The first one comes before the process looks whether it may work.
    """
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    heartbeat = begun(instance, run)
    first = sign(instance, run)
    assert first.startswith("0/1000.0 ")
    with heartbeat:
        wait_until(
            lambda: sign(instance, run) not in {first, ""}, timeout_s=30, what="another beat"
        )
    assert run_events_of(instance, run.run_id) == {RunEvent.BEGAN, RunEvent.FINISHED}


@pytest.mark.parametrize("timeout_s", [20.0, 0.5, 123_456_789.0])
@pytest.mark.parametrize("partitions", [[], [tp(0), tp(2)]])
def test_a_run_is_judged_by_the_time_out_that_it_was_told(
    instance: dg.DagsterInstance, batch_id: str, timeout_s: float, partitions: list[TopicPartition]
) -> None:
    """A deploy that shortens it took live runs for dead, and others began beside them."""
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    heartbeat = Heartbeat(instance, run, timeout_s=timeout_s)
    heartbeat.says = lambda: spelled_partitions(partitions)
    heartbeat.begin()
    (seen,) = RunLedger(instance, "etl").read({batch_id})
    assert seen.heartbeat_timeout_s == timeout_s
    assert seen.may_work_on == frozenset(partitions)


def test_beats_come_six_times_as_often_as_they_have_to(
    monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance, batch_id: str
) -> None:
    """Rarer, and each healthy run that lasts longer than the time-out would be ended as dead."""
    monkeypatch.undo()
    assert (
        Heartbeat(
            instance, make_run(instance, batch_request(batch_id), Status.STARTED), timeout_s=60.0
        ).interval_s
        == 10.0
    )


def test_the_lease_counts_from_before_the_sign_was_written(
    monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance, batch_id: str
) -> None:
    """A member may read the sign at once, and the answer of a slow storage may come much later."""
    real, at = Heartbeats.give, [1_000.0]

    def slow(signs: Heartbeats, run: dg.DagsterRun, number: int, sign: str) -> None:
        real(signs, run, number, sign)
        at[0] += 50.0

    monkeypatch.setattr(boot_clock, "seconds", lambda: at[0])
    monkeypatch.setattr(Heartbeats, "give", slow)
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    heartbeat = begun(instance, run, timeout_s=60.0)
    assert str(heartbeat.why_too_late()).startswith("it could give no sign of life for 50 s")


@pytest.mark.parametrize("status", [Status.FAILURE, Status.CANCELED])
def test_a_run_that_ended_in_dagster_is_interrupted_and_says_when_it_is_finished(
    instance: dg.DagsterInstance, batch_id: str, interrupts: list[int], status: dg.DagsterRunStatus
) -> None:
    """The run was taken for dead, or a person forced its end.

    Its batch is requested again as soon as the run says that it is finished.
    """
    run = make_run(instance, batch_request(batch_id), status)
    with INTERRUPTED, begun(instance, run):
        wait_until(lambda: interrupts, timeout_s=30, what="the interrupt")
        before = sign(instance, run)
    assert interrupts == [signal.SIGTERM], "once is enough"
    assert run_events_of(instance, run.run_id) == {RunEvent.BEGAN, RunEvent.FINISHED}
    assert sign(instance, run) == before, "a run that stops gives no signs of life"


def test_a_run_above_its_limit_is_interrupted_and_a_failed_attempt(
    instance: dg.DagsterInstance, interrupts: list[int], batch_id: str
) -> None:
    """A batch that does not return has an end also with a run for each batch."""
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    heartbeat = Heartbeat(instance, run, timeout_s=60.0, limit_s=0.05)
    heartbeat.begin()
    why = pytest.raises(dg.DagsterExecutionInterruptedError, match=r"batch_timeout_s=0\.05")
    with why, heartbeat:
        wait_until(lambda: interrupts, timeout_s=60, what="an interrupt")
        raise dg.DagsterExecutionInterruptedError
    assert RunEvent.INTERRUPTED not in run_events_of(instance, run.run_id)
    assert RunEvent.TAKEN_BACK not in run_events_of(instance, run.run_id)


def test_a_run_that_is_deleted_while_it_works_is_interrupted(
    instance: dg.DagsterInstance, batch_id: str, interrupts: list[int]
) -> None:
    """Nobody sees it any more, so nobody waits for it for long."""
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    with INTERRUPTED, begun(instance, run):
        instance.delete_run(run.run_id)
        wait_until(lambda: interrupts, timeout_s=30, what="the interrupt")
    assert interrupts == [signal.SIGTERM]


def test_a_run_that_is_deleted_before_it_began_does_not_begin(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """There is nothing that others could see of it."""
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    instance.delete_run(run.run_id)
    with pytest.raises(IllegalStateError, match="is not in Dagster any more"):
        Heartbeat(instance, run, timeout_s=PATIENT_S).begin()


def test_a_run_that_cannot_give_its_first_sign_has_not_begun(
    monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance, batch_id: str
) -> None:
    """It fails before it looks whether it may work: nobody waits for its time-out."""

    def give(*_: object) -> None:
        msg = "database is locked"
        raise OSError(msg)

    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    monkeypatch.setattr(Heartbeats, "give", give)
    with pytest.raises(OSError, match="database is locked"):
        Heartbeat(instance, run, timeout_s=PATIENT_S).begin()
    instance.report_run_failed(run)
    (seen,) = RunLedger(instance, "etl").read([batch_id])
    assert not seen.is_live


def test_a_run_that_waited_for_longer_than_its_lease_while_it_looked_must_not_begin(
    monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance, batch_id: str
) -> None:
    """Storage or Kafka kept the run waiting.

    Its member may have requested the work again meanwhile.
    """
    heartbeat = begun(instance, make_run(instance, batch_request(batch_id), Status.STARTED))
    assert heartbeat.why_too_late() is None
    later = boot_clock.seconds() + PATIENT_S
    monkeypatch.setattr(boot_clock, "seconds", lambda: later)
    assert str(heartbeat.why_too_late()).startswith("it could give no sign of life for 1000 s")


def test_a_report_that_hangs_ends_the_run_although_others_beat(
    monkeypatch: pytest.MonkeyPatch,
    instance: dg.DagsterInstance,
    batch_id: str,
    interrupts: list[int],
) -> None:
    """The thread that works waits for an answer that never comes, and hears no signal there."""
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    heartbeat = begun(instance, run)
    later = boot_clock.seconds() + PATIENT_S
    with heartbeat.reporting():
        monkeypatch.setattr(boot_clock, "seconds", lambda: later)
        heartbeat.beat(instance)
        assert heartbeat._see_to_lease()
        assert interrupts
    assert heartbeat.interrupted_because.startswith("waited 1000 s for Dagster's storage to take")
    assert heartbeat.why_too_late() is None


def test_a_run_that_is_being_cancelled_still_gives_signs(
    instance: dg.DagsterInstance, batch_id: str, interrupts: list[int]
) -> None:
    """It may work until Dagster shows it as cancelled, and Dagster interrupts it by itself."""
    run = make_run(instance, batch_request(batch_id), Status.CANCELING)
    with begun(instance, run):
        wait_until(
            lambda: not sign(instance, run).startswith("0/"), timeout_s=30, what="another beat"
        )
    assert not interrupts


def test_a_run_that_a_member_cancels_interrupts_itself_once(
    instance: dg.DagsterInstance, batch_id: str, interrupts: list[int]
) -> None:
    """Dagster's default launcher is not asked: it could block its code server."""
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    with begun(instance, run) as heartbeat:
        RunLedger(instance, "etl").cancel(run.run_id)
        wait_until(lambda: interrupts, timeout_s=30, what="the interrupt")
        heartbeat._stop_if_asked(instance)
    assert interrupts == [signal.SIGTERM]
    assert run_events_of(instance, run.run_id) == {
        *(RunEvent.BEGAN, RunEvent.TAKEN_BACK, RunEvent.STOP, RunEvent.FINISHED)
    }


def test_a_run_that_is_cancelled_as_its_steps_end_is_not_interrupted(
    instance: dg.DagsterInstance, batch_id: str, interrupts: list[int]
) -> None:
    """The interrupt would hit what Dagster reports of the run."""
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    with begun(instance, run) as heartbeat:
        pass
    record_run_event(instance, run, RunEvent.STOP)
    heartbeat._stop_if_asked(instance)
    assert not interrupts


class HangingStorage:
    """Signs of life that are not answered until somebody lets them go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs, self.goes_on = threading.Event(), threading.Event()
        real = Heartbeats.give

        def give(signs: Heartbeats, run: dg.DagsterRun, number: int, text: str) -> None:
            if not text.startswith("0/"):
                self.hangs.set()
                self.goes_on.wait(60)
            real(signs, run, number, text)

        monkeypatch.setattr(Heartbeats, "give", give)


def test_a_run_whose_storage_hangs_interrupts_itself_and_does_not_hang_with_it(
    instance: dg.DagsterInstance,
    batch_id: str,
    interrupts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others see no sign of it, and begin its work anew.

    A database behind a dead network answers after minutes, or never.
    """
    monkeypatch.setattr(heartbeat_module, "LAST_WORD_LIMIT_S", 0.01)
    storage = HangingStorage(monkeypatch)
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    with INTERRUPTED, begun(instance, run, timeout_s=6.0):
        wait_until(lambda: interrupts, timeout_s=30, what="the interrupt")
    assert storage.hangs.is_set()
    assert not storage.goes_on.is_set(), "leaving did not wait for the storage"
    storage.goes_on.set()
    assert interrupts == [signal.SIGTERM]


def test_a_run_that_stopped_because_it_was_cut_off_is_no_failed_attempt(
    instance: dg.DagsterInstance,
    batch_id: str,
    interrupts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That the storage was away says nothing about the records."""
    storage = HangingStorage(monkeypatch)
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    with INTERRUPTED, begun(instance, run, timeout_s=6.0):
        wait_until(lambda: interrupts, timeout_s=30, what="the interrupt")
        storage.goes_on.set()
    assert run_events_of(instance, run.run_id) == {
        RunEvent.BEGAN,
        RunEvent.TAKEN_BACK,
        RunEvent.FINISHED,
    }


def test_a_run_that_was_suspended_for_longer_than_its_lease_ends_as_failed(
    instance: dg.DagsterInstance,
    batch_id: str,
    interrupts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run wakes when its steps are done, before its own watch does.

    By then its batch may have another run.
    """
    monkeypatch.setattr(heartbeat_module, "_LOOKS_PER_TIMEOUT", 1)
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    heartbeat = begun(instance, run)
    interrupted = pytest.raises(
        dg.DagsterExecutionInterruptedError, match=f"run {run.run_id} could give no sign of life"
    )
    with interrupted, heartbeat:
        wait_until(lambda: sign(instance, run).startswith("1/"), timeout_s=30, what="a look")
        heartbeat._beaten_at -= PATIENT_S
    assert run_events_of(instance, run.run_id) == {
        RunEvent.BEGAN,
        RunEvent.TAKEN_BACK,
        RunEvent.FINISHED,
    }
    assert not interrupts, "its steps are done"


@pytest.mark.parametrize("end", ["report_run_canceled", "report_run_failed", "delete"])
def test_a_run_that_ends_in_dagster_as_its_steps_end_does_not_succeed(
    instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """It would turn its end into a success after its batch was requested again."""
    monkeypatch.setattr(heartbeat_module, "_LOOKS_PER_TIMEOUT", 1)
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    heartbeat = begun(instance, run)
    interrupted = pytest.raises(
        dg.DagsterExecutionInterruptedError, match=r"(is CANCELED|is FAILURE|was deleted)"
    )
    with interrupted, heartbeat:
        wait_until(lambda: sign(instance, run).startswith("1/"), timeout_s=30, what="a look")
        if end == "delete":
            instance.delete_run(run.run_id)
        else:
            getattr(instance, end)(run)


def _deaf_run(ref: dg.InstanceRef, run_id: str) -> None:
    """A run in a process of its own that does not hear of interrupts.

    The process is in a call that does not return.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with dg.DagsterInstance.from_ref(ref) as instance:
        run = instance.get_run_by_id(run_id)
        assert run is not None
        heartbeat = Heartbeat(instance, run, timeout_s=6.0)
        heartbeat.begin()
        with heartbeat:
            threading.Event().wait()


def test_a_run_that_does_not_hear_the_interrupt_ends_hard(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """Before others take it for dead; and its member sees at once that its process is gone."""
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    process = multiprocessing.get_context("spawn").Process(
        target=_deaf_run, args=(instance.get_ref(), run.run_id)
    )
    process.start()
    wait_until(
        lambda: RunEvent.BEGAN in run_events_of(instance, run.run_id),
        timeout_s=60,
        what="a run that works",
    )
    ledger = RunLedger(instance, "etl")
    instance.report_run_canceled(run)
    (seen,) = ledger.read([batch_id])
    assert (seen.is_live, seen.is_gone, seen.is_over) == (True, False, False)
    process.join(60)
    assert process.exitcode == 128 + signal.SIGKILL
    (seen,) = ledger.read([batch_id])
    assert (seen.is_live, seen.is_gone, seen.is_over) == (True, True, False)
    ledger.end_dead(run.run_id, seen.heartbeat)
    assert not ledger.read([batch_id])[0].is_live


IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]


def test_the_first_process_of_a_container_ends_hard() -> None:
    """The kernel discards a SIGKILL that such a process sends to itself."""
    if (
        shutil.which("unshare") is None
        or subprocess.run([*IN_A_NAMESPACE, "true"], check=False).returncode
    ):
        pytest.skip("this machine gives no namespace of process ids to its users")
    code = (
        "import os; from dagster_rebalance.orchestration.runs.process import end_hard; "
        "assert os.getpid() == 1; end_hard()"
    )
    done = subprocess.run([*IN_A_NAMESPACE, sys.executable, "-c", code], check=False)
    assert done.returncode == 128 + signal.SIGKILL


def test_a_beat_that_fails_is_tried_again(
    instance: dg.DagsterInstance,
    batch_id: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The database may be away for a moment; the run goes on."""
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    heartbeat = begun(instance, run)
    real, failures = Heartbeats.give, iter([OSError("database is locked")] * 2)

    def give(signs: Heartbeats, whose: dg.DagsterRun, number: int, text: str) -> None:
        for problem in failures:
            raise problem
        real(signs, whose, number, text)

    monkeypatch.setattr(Heartbeats, "give", give)
    with heartbeat:
        wait_until(lambda: not sign(instance, run).startswith("0/"), timeout_s=30, what="a beat")
    assert caplog.text.count("could not give a sign of life") == 2


def test_a_run_whose_process_a_signal_told_to_end_is_no_failed_attempt(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """A drained node says nothing about the records, and must not stop a partition.

    The word comes before the one that it is finished, which is what its member waits for.
    """
    run = make_run(instance, batch_request(batch_id), Status.STARTED)
    with INTERRUPTED, begun(instance, run):
        raise dg.DagsterExecutionInterruptedError
    instance.report_run_failed(run)
    assert run_events_of(instance, run.run_id) == {
        RunEvent.BEGAN,
        RunEvent.INTERRUPTED,
        RunEvent.FINISHED,
    }
    (seen,) = RunLedger(instance, "etl").read({batch_id})
    assert (seen.is_interrupted, setback_of(seen)) == (True, Setback.INTERRUPTED)


def test_a_run_that_a_person_cancelled_was_not_only_told_to_end(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """Dagster sends the same signal then. Who cancels wants the range to be left alone."""
    run = make_run(instance, batch_request(batch_id), Status.CANCELING)
    with INTERRUPTED, begun(instance, run):
        raise dg.DagsterExecutionInterruptedError
    assert run_events_of(instance, run.run_id) == {RunEvent.BEGAN, RunEvent.FINISHED}
