"""The heartbeat of a run, in the process of the test, which is the one interrupted."""

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
from dagster_rebalance.core.runs.progress import FailureKind, failure_kind
from dagster_rebalance.orchestration.runs import heartbeat as heartbeat_module
from dagster_rebalance.orchestration.runs import process
from dagster_rebalance.orchestration.runs.heartbeat import Heartbeat
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.heartbeats import (
    Heartbeats,
    format_partitions,
    partitions_in,
)
from dagster_rebalance.orchestration.storage.run_tags import (
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
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


INTERRUPTED = pytest.raises(dg.DagsterExecutionInterruptedError)
"""A run that was interrupted does not end as a success, also where the interrupt comes too late to
be heard."""


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check and send heartbeats often, whatever the timeout is."""
    monkeypatch.setattr(heartbeat_module, "_CHECKS_PER_TIMEOUT", 100_000)
    monkeypatch.setattr(heartbeat_module, "_BEATS_PER_TIMEOUT", 100_000)


def expire_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    later = process.boot_time_s() + PATIENT_S
    monkeypatch.setattr(process, "boot_time_s", lambda: later)


def begun(
    instance: dg.DagsterInstance, run: dg.DagsterRun, timeout_s: float = PATIENT_S
) -> Heartbeat:
    heartbeat = Heartbeat(instance, run, timeout_s=timeout_s)
    heartbeat.begin()
    return heartbeat


def sign(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    record = instance.get_run_record_by_id(run.run_id)
    assert record is not None
    return Heartbeats(instance).read({run.run_id: record.storage_id}).get(run.run_id, "")


def test_heartbeat_changes_while_run_works(
    instance: dg.DagsterInstance, run: dg.DagsterRun
) -> None:
    heartbeat = begun(instance, run)
    first = sign(instance, run)
    assert first.startswith("0/1000.0 ")
    with heartbeat:
        wait_until(
            lambda: sign(instance, run) not in {first, ""}, timeout_s=120, what="another beat"
        )
    assert run_events_of(instance, run.run_id) == {RunEvent.BEGAN, RunEvent.FINISHED}


@pytest.mark.parametrize("timeout_s", [20.0, 0.5, 123_456_789.0])
@pytest.mark.parametrize("partitions", [frozenset(), frozenset({tp(0), tp(2)})])
def test_heartbeat_has_the_timeout_that_the_run_began_with(
    instance: dg.DagsterInstance,
    batch_id: str,
    run: dg.DagsterRun,
    timeout_s: float,
    partitions: frozenset[TopicPartition],
) -> None:
    """A deploy may shorten it."""
    heartbeat = Heartbeat(instance, run, timeout_s=timeout_s)
    heartbeat.partitions = lambda: format_partitions(partitions)
    heartbeat.begin()
    (seen,) = RunLedger(instance, "etl").read({batch_id})
    assert seen.heartbeat_timeout_s == timeout_s
    assert seen.active_partitions == partitions


@pytest.mark.parametrize(
    "heartbeat",
    ["3/60.0", "3/60.0 -", "3/60.0 - ", "3/60.0 - p q", "x - p", "3 orders p", "3 -- p"],
)
def test_partitions_in_a_malformed_heartbeat_are_unknown(heartbeat: str) -> None:
    assert partitions_in(heartbeat) is None


def test_partitions_in_consecutive_heartbeats_are_the_same_set() -> None:
    text = format_partitions(frozenset({tp(0), tp(2)}))
    first, second = (partitions_in(f"{number}/60.0 {text} p") for number in (3, 4))
    assert first is second
    assert text is format_partitions(frozenset({tp(0), tp(2)}))


def test_heartbeat_interval_is_a_sixth_of_the_timeout(
    monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance, batch_id: str
) -> None:
    monkeypatch.undo()
    assert (
        Heartbeat(
            instance, make_run(instance, batch_request(batch_id), Status.STARTED), timeout_s=60.0
        ).interval_s
        == 10.0
    )


def test_lease_starts_before_the_heartbeat_is_written(
    monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance, run: dg.DagsterRun
) -> None:
    """A member may read it at once, long before a slow storage answers."""
    real, at = Heartbeats.record, [1_000.0]

    def slow(signs: Heartbeats, run: dg.DagsterRun, number: int, sign: str) -> None:
        real(signs, run, number, sign)
        at[0] += 50.0

    monkeypatch.setattr(process, "boot_time_s", lambda: at[0])
    monkeypatch.setattr(Heartbeats, "record", slow)
    heartbeat = begun(instance, run, timeout_s=60.0)
    assert str(heartbeat.why_too_late()).startswith("it could send no heartbeat for 50 s")


@pytest.mark.parametrize("status", [Status.FAILURE, Status.CANCELED])
def test_run_that_ended_in_dagster_is_interrupted_and_records_finished(
    instance: dg.DagsterInstance, batch_id: str, interrupts: list[int], status: dg.DagsterRunStatus
) -> None:
    run = make_run(instance, batch_request(batch_id), status)
    with INTERRUPTED, begun(instance, run):
        wait_until(lambda: interrupts, timeout_s=120, what="the interrupt")
        before = sign(instance, run)
    assert interrupts == [signal.SIGTERM], "once is enough"
    assert run_events_of(instance, run.run_id) == {RunEvent.BEGAN, RunEvent.FINISHED}
    assert sign(instance, run) == before, "a run that stops gives no signs of life"


def test_run_above_its_limit_is_interrupted_as_failed_attempt(
    instance: dg.DagsterInstance, interrupts: list[int], run: dg.DagsterRun
) -> None:
    heartbeat = Heartbeat(instance, run, timeout_s=60.0, limit_s=0.05)
    heartbeat.begin()
    why = pytest.raises(dg.DagsterExecutionInterruptedError, match=r"batch_timeout_s=0\.05")
    with why, heartbeat:
        wait_until(lambda: interrupts, timeout_s=120, what="an interrupt")
        raise dg.DagsterExecutionInterruptedError
    assert RunEvent.INTERRUPTED not in run_events_of(instance, run.run_id)
    assert RunEvent.TAKEN_BACK not in run_events_of(instance, run.run_id)


def test_deleted_run_is_interrupted(
    instance: dg.DagsterInstance, run: dg.DagsterRun, interrupts: list[int]
) -> None:
    with INTERRUPTED, begun(instance, run):
        instance.delete_run(run.run_id)
        wait_until(lambda: interrupts, timeout_s=120, what="the interrupt")
    assert interrupts == [signal.SIGTERM]


def test_run_deleted_before_it_began_does_not_begin(
    instance: dg.DagsterInstance, run: dg.DagsterRun
) -> None:
    instance.delete_run(run.run_id)
    with pytest.raises(IllegalStateError, match="no longer exists in Dagster"):
        Heartbeat(instance, run, timeout_s=PATIENT_S).begin()


def test_run_without_first_heartbeat_has_not_begun(
    monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun
) -> None:
    def give(*_: object) -> None:
        msg = "database is locked"
        raise OSError(msg)

    monkeypatch.setattr(Heartbeats, "record", give)
    with pytest.raises(OSError, match="database is locked"):
        Heartbeat(instance, run, timeout_s=PATIENT_S).begin()
    instance.report_run_failed(run)
    (seen,) = RunLedger(instance, "etl").read([batch_id])
    assert not seen.is_live


def test_run_whose_lease_expired_in_start_check_does_not_begin(
    monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance, batch_id: str
) -> None:
    heartbeat = begun(instance, make_run(instance, batch_request(batch_id), Status.STARTED))
    assert heartbeat.why_too_late() is None
    expire_lease(monkeypatch)
    assert str(heartbeat.why_too_late()).startswith("it could send no heartbeat for 1000 s")


def test_hanging_report_ends_run_despite_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
    instance: dg.DagsterInstance,
    run: dg.DagsterRun,
    interrupts: list[int],
) -> None:
    """The thread that works waits forever, and receives no signal."""
    heartbeat = begun(instance, run)
    with heartbeat.reporting():
        expire_lease(monkeypatch)
        heartbeat.beat(instance)
        assert heartbeat._check_lease()
        assert interrupts
    assert heartbeat.interrupted_because.startswith("waited 1000 s for Dagster's storage to accept")
    assert heartbeat.why_too_late() is None


def test_canceling_run_sends_heartbeats(
    instance: dg.DagsterInstance, batch_id: str, interrupts: list[int]
) -> None:
    run = make_run(instance, batch_request(batch_id), Status.CANCELING)
    with begun(instance, run):
        wait_until(
            lambda: not sign(instance, run).startswith("0/"), timeout_s=120, what="another beat"
        )
    assert not interrupts


def test_run_with_stop_event_interrupts_itself_once(
    instance: dg.DagsterInstance, run: dg.DagsterRun, interrupts: list[int]
) -> None:
    with begun(instance, run) as heartbeat:
        RunLedger(instance, "etl").cancel(run.run_id)
        wait_until(lambda: interrupts, timeout_s=120, what="the interrupt")
        heartbeat._interrupt_if_stopped(instance)
    assert interrupts == [signal.SIGTERM]
    assert run_events_of(instance, run.run_id) == {
        *(RunEvent.BEGAN, RunEvent.TAKEN_BACK, RunEvent.STOP, RunEvent.FINISHED)
    }


def test_run_cancelled_after_its_steps_is_not_interrupted(
    instance: dg.DagsterInstance, run: dg.DagsterRun, interrupts: list[int]
) -> None:
    with begun(instance, run) as heartbeat:
        pass
    record_run_event(instance, run, RunEvent.STOP)
    heartbeat._interrupt_if_stopped(instance)
    assert not interrupts


class HangingStorage:
    """A storage in which heartbeats block until the test releases them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs, self.goes_on = threading.Event(), threading.Event()
        real = Heartbeats.record

        def give(signs: Heartbeats, run: dg.DagsterRun, number: int, text: str) -> None:
            if not text.startswith("0/"):
                self.hangs.set()
                self.goes_on.wait(120)
            real(signs, run, number, text)

        monkeypatch.setattr(Heartbeats, "record", give)


def test_run_with_hanging_storage_interrupts_itself(
    instance: dg.DagsterInstance,
    run: dg.DagsterRun,
    interrupts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat_module, "LAST_EVENT_LIMIT_S", 0.01)
    storage = HangingStorage(monkeypatch)
    with INTERRUPTED, begun(instance, run):
        assert storage.hangs.wait(120)
        expire_lease(monkeypatch)
        wait_until(lambda: interrupts, timeout_s=120, what="the interrupt")
    assert not storage.goes_on.is_set(), "leaving did not wait for the storage"
    storage.goes_on.set()
    assert interrupts == [signal.SIGTERM]


def test_run_that_lost_its_lease_is_no_failed_attempt(
    instance: dg.DagsterInstance,
    run: dg.DagsterRun,
    interrupts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = HangingStorage(monkeypatch)
    with INTERRUPTED, begun(instance, run):
        assert storage.hangs.wait(120)
        expire_lease(monkeypatch)
        wait_until(lambda: interrupts, timeout_s=120, what="the interrupt")
        storage.goes_on.set()
    assert run_events_of(instance, run.run_id) == {
        RunEvent.BEGAN,
        RunEvent.TAKEN_BACK,
        RunEvent.FINISHED,
    }


def test_run_suspended_beyond_its_lease_fails(
    instance: dg.DagsterInstance,
    run: dg.DagsterRun,
    interrupts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat_module, "_CHECKS_PER_TIMEOUT", 1)
    heartbeat = begun(instance, run)
    interrupted = pytest.raises(
        dg.DagsterExecutionInterruptedError, match=f"run {run.run_id} could send no heartbeat"
    )
    with interrupted, heartbeat:
        wait_until(lambda: sign(instance, run).startswith("1/"), timeout_s=120, what="a look")
        with heartbeat._beating:  # it sets the time after the heartbeat is stored
            heartbeat._beaten_at -= PATIENT_S
    assert run_events_of(instance, run.run_id) == {
        RunEvent.BEGAN,
        RunEvent.TAKEN_BACK,
        RunEvent.FINISHED,
    }
    assert not interrupts, "its steps are done"


@pytest.mark.parametrize("end", ["report_run_canceled", "report_run_failed", "delete"])
def test_run_that_ended_in_dagster_with_its_steps_does_not_succeed(
    instance: dg.DagsterInstance, run: dg.DagsterRun, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(heartbeat_module, "_CHECKS_PER_TIMEOUT", 1)
    heartbeat = begun(instance, run)
    interrupted = pytest.raises(
        dg.DagsterExecutionInterruptedError, match=r"(is CANCELED|is FAILURE|was deleted)"
    )
    with interrupted, heartbeat:
        wait_until(lambda: sign(instance, run).startswith("1/"), timeout_s=120, what="a look")
        if end == "delete":
            instance.delete_run(run.run_id)
        else:
            getattr(instance, end)(run)


def _deaf_run(ref: dg.InstanceRef, run_id: str) -> None:
    """Execute a run that ignores SIGTERM, in another process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with dg.DagsterInstance.from_ref(ref) as instance:
        run = instance.get_run_by_id(run_id)
        assert run is not None
        # A sixth of it passes before the end of the process, and the test looks at it before.
        heartbeat = Heartbeat(instance, run, timeout_s=30.0)
        heartbeat.begin()
        with heartbeat:
            threading.Event().wait()


def test_run_that_ignores_the_interrupt_is_killed(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun
) -> None:
    child = multiprocessing.get_context("spawn").Process(
        target=_deaf_run, args=(instance.get_ref(), run.run_id)
    )
    child.start()
    wait_until(
        lambda: RunEvent.BEGAN in run_events_of(instance, run.run_id),
        timeout_s=120,
        what="a run that works",
    )
    ledger = RunLedger(instance, "etl")
    instance.report_run_canceled(run)
    (seen,) = ledger.read([batch_id])
    assert (seen.is_live, seen.is_gone, seen.is_over) == (True, False, False)
    child.join(120)
    assert child.exitcode == 128 + signal.SIGKILL
    (seen,) = ledger.read([batch_id])
    assert (seen.is_live, seen.is_gone, seen.is_over) == (True, True, False)
    ledger.end_dead(run.run_id, seen.heartbeat)
    assert not ledger.read([batch_id])[0].is_live


IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]


def test_process_with_pid_1_is_killed() -> None:
    """The kernel discards a SIGKILL from inside its namespace."""
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


def test_failed_heartbeat_is_retried(
    instance: dg.DagsterInstance,
    run: dg.DagsterRun,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heartbeat = begun(instance, run)
    real, failures = Heartbeats.record, iter([OSError("database is locked")] * 2)

    def give(signs: Heartbeats, whose: dg.DagsterRun, number: int, text: str) -> None:
        for problem in failures:
            raise problem
        real(signs, whose, number, text)

    monkeypatch.setattr(Heartbeats, "record", give)
    with heartbeat:
        wait_until(lambda: not sign(instance, run).startswith("0/"), timeout_s=120, what="a beat")
    assert caplog.text.count("could not send a heartbeat") == 2


def test_run_ended_by_a_signal_is_no_failed_attempt(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun
) -> None:
    """INTERRUPTED precedes FINISHED, for which its member waits."""
    with INTERRUPTED, begun(instance, run):
        raise dg.DagsterExecutionInterruptedError
    instance.report_run_failed(run)
    assert run_events_of(instance, run.run_id) == {
        RunEvent.BEGAN,
        RunEvent.INTERRUPTED,
        RunEvent.FINISHED,
    }
    (seen,) = RunLedger(instance, "etl").read({batch_id})
    assert (seen.is_interrupted, failure_kind(seen)) == (True, FailureKind.INTERRUPTED)


def test_run_cancelled_by_a_user_is_not_interrupted(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """Dagster sends the same signal."""
    run = make_run(instance, batch_request(batch_id), Status.CANCELING)
    with INTERRUPTED, begun(instance, run):
        raise dg.DagsterExecutionInterruptedError
    assert run_events_of(instance, run.run_id) == {RunEvent.BEGAN, RunEvent.FINISHED}
