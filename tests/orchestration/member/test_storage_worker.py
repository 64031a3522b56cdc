"""The thread that calls Dagster's storage.

If the storage hangs, fails or is slow, the member continues.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model import events
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.member.storage_worker import Job, StorageWorker
from dagster_rebalance.orchestration.runs.canceller import in_thread
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fake_group import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Desk:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.notes: list[str] = []
        self.done: list[str] = []
        self.let_go = threading.Event()
        self.woken = 0
        self.worker = StorageWorker(self.notes.append, in_thread, self.clock, self.wake)

    def wake(self) -> None:
        self.woken += 1

    def job(
        self,
        name: str,
        slot: str | None = None,
        subject: object = None,
        *,
        can_wait: bool = False,
    ) -> Job:
        return Job(
            name,
            lambda: self.done.append(name),
            lambda _: events.TickArrived(),
            slot=slot,
            subject=subject,
            can_wait=can_wait,
        )

    def hang(
        self, name: str = "reading runs", subject: object = None, *, is_kept: bool = False
    ) -> None:
        """Ask for a job whose first run hangs until `let_go`."""
        began = threading.Event()

        def work() -> None:
            if not began.is_set():
                began.set()
                assert self.let_go.wait(120)
            self.done.append(name)

        self.worker.ask(
            Job(name, work, lambda _: events.TickArrived(), subject=subject, is_kept=is_kept)
        )
        assert began.wait(120)

    def ask_to_record(self, name: str, *failures: str) -> None:
        """Ask for a kept job that fails with these messages first."""
        left = list(failures)

        def work() -> None:
            if left:
                raise OSError(left.pop(0))
            self.done.append(name)

        self.worker.ask(Job(name, work, can_wait=True, is_kept=True))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.worker.replace_hung_thread()

    def until(self, condition: Callable[[], object]) -> None:
        wait_until(
            condition,
            timeout_s=120,
            what=lambda: f"the storage; done: {self.done}, notes: {self.notes}",
        )


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.let_go.set()
    made.worker.finish(60)


def test_jobs_run_one_at_a_time_in_order(desk: Desk) -> None:
    desk.hang("first")
    for number in range(20):
        desk.worker.ask(desk.job(str(number)))
    assert desk.done == []
    desk.let_go.set()
    desk.until(lambda: len(desk.done) == 21)
    assert desk.done == ["first", *map(str, range(20))]
    assert [answer() for answer in desk.worker.answers()] == [events.TickArrived()] * 21


def test_job_that_can_wait_runs_after_the_others(desk: Desk) -> None:
    desk.hang("first")
    for name, can_wait in (("seen 1", True), ("runs", False), ("seen 2", True), ("orders", False)):
        desk.worker.ask(desk.job(name, can_wait=can_wait))
    desk.let_go.set()
    desk.until(lambda: len(desk.done) == 5)
    assert desk.done == ["first", "runs", "orders", "seen 1", "seen 2"]


def test_job_that_can_wait_runs_after_eight_others(desk: Desk) -> None:
    desk.hang("first")
    desk.worker.ask(desk.job("seen", can_wait=True))
    for number in range(20):
        desk.worker.ask(desk.job(str(number)))
    desk.let_go.set()
    desk.until(lambda: len(desk.done) == 22)
    assert desk.done == ["first", *map(str, range(8)), "seen", *map(str, range(8, 20))]


def test_answer_wakes_the_member_unless_it_can_wait(desk: Desk) -> None:
    """A takeover needs three answers one after the other."""
    desk.worker.ask(desk.job("seen", can_wait=True))
    desk.until(lambda: desk.done)
    desk.worker.ask(desk.job("runs"))
    desk.worker.finish(60)
    assert desk.woken == 1


def test_repeated_jobs_do_not_accumulate(desk: Desk) -> None:
    desk.hang(subject="the same question")
    for _ in range(3_600):
        desk.worker.ask(desk.job("again", slot="runs", subject="the same question"))
    for number in range(3_600):
        desk.worker.ask(desk.job(f"newer {number}", slot="runs", subject=number))
    desk.let_go.set()
    desk.until(lambda: desk.done == ["reading runs", "newer 3599"])


def test_silent_storage_is_reported(desk: Desk) -> None:
    assert desk.worker.silence is None
    desk.hang()
    desk.clock.advance(5)
    assert desk.worker.silence is None
    desk.clock.advance(40)
    assert str(desk.worker.silence).startswith(
        "Dagster's storage has not answered for 45 s (reading runs)"
    )
    desk.let_go.set()
    desk.until(lambda: desk.worker.silence is None)
    assert desk.notes == ["reading runs took 45.0 s"]


def test_hanging_job_is_overtaken_and_its_late_answer_dropped(desk: Desk) -> None:
    """A connection that a firewall has dropped hangs for hours."""
    desk.hang()
    desk.worker.ask(desk.job("next"))
    desk.clock.advance(59)
    desk.worker.replace_hung_thread()
    assert desk.done == []
    desk.clock.advance(2)
    desk.worker.replace_hung_thread()
    desk.until(lambda: desk.done == ["next"])
    assert "no answer from Dagster's storage for 61 s" in desk.notes[0]
    desk.let_go.set()
    desk.until(lambda: desk.done == ["next", "reading runs"])
    assert len(list(desk.worker.answers())) == 1, "the answer of the one that hung came too late"


def test_hanging_threads_are_limited(desk: Desk) -> None:
    desk.hang()
    for _ in range(24 * 60):
        desk.worker.ask(Job("next", lambda: desk.let_go.wait(120), slot="next"))
        desk.until(lambda: desk.worker._running is not None)
        desk.pass_time(60)
    overtaken = [note for note in desk.notes if "no answer" in note]
    assert len(overtaken) == 24
    assert desk.worker.silence is not None
    desk.let_go.set()
    desk.until(lambda: desk.worker.silence is None)
    desk.until(lambda: not desk.worker._hung)


def test_patience_is_reset_after_an_outage(
    desk: Desk,
) -> None:
    desk.hang()
    desk.clock.advance(60)
    desk.worker.replace_hung_thread()
    desk.worker.ask(desk.job("next"))
    desk.until(lambda: desk.done)
    desk.until(lambda: list(desk.worker.answers()))
    desk.hang("another")
    desk.clock.advance(61)
    desk.worker.replace_hung_thread()
    assert len(desk.notes) == 2


def test_failure_is_a_note_and_no_answer(desk: Desk) -> None:
    def fails() -> None:
        message = "database is locked"
        raise OSError(message)

    desk.worker.ask(Job("RecordCommit", fails, is_repeated=True))
    desk.worker.ask(Job("showing the state", fails))
    desk.until(lambda: len(desk.notes) == 2)
    assert desk.notes == [
        "RecordCommit failed and is retried: database is locked",
        "showing the state failed: database is locked",
    ]
    assert list(desk.worker.answers()) == []


def test_configuration_error_reaches_the_member(desk: Desk) -> None:
    def fails() -> None:
        message = "the job has no such resource"
        raise ConfigurationError(message)

    desk.worker.ask(Job("ReadRuns", fails))
    desk.worker.finish(60)
    (answer,) = desk.worker.answers()
    with pytest.raises(ConfigurationError, match="no such resource"):
        answer()


def test_finish_waits_for_the_queue_but_not_for_a_hanging_storage(desk: Desk) -> None:
    desk.worker.ask(desk.job("left"))
    desk.worker.finish(60)
    assert desk.done == ["left"]
    desk.hang()
    desk.worker.ask(desk.job("dropped"))
    desk.worker.finish(0.01)
    desk.let_go.set()
    desk.until(lambda: "reading runs" in desk.done)
    assert "dropped" not in desk.done


def test_cancelled_job_is_dropped_unless_it_runs(desk: Desk) -> None:
    desk.hang("running")
    desk.worker.ask(desk.job("waiting", slot="record"))
    desk.worker.ask(desk.job("next"))
    desk.worker.cancel("record")
    desk.worker.cancel("unknown")
    desk.let_go.set()
    desk.until(lambda: len(desk.done) == 2)
    assert desk.done == ["running", "next"]


def test_kept_job_is_repeated_before_later_ones(desk: Desk) -> None:
    """A hold that is recorded after its receipt would be shown as open."""
    desk.ask_to_record("hold", "database is locked")
    desk.ask_to_record("receipt")
    desk.until(lambda: desk.notes == ["hold failed and is retried: database is locked"])
    desk.worker.ask(desk.job("runs"))
    desk.until(lambda: desk.done == ["runs"])
    desk.pass_time(1)
    desk.worker.ask(desk.job("orders"))
    desk.until(lambda: desk.done == ["runs", "orders"])
    desk.pass_time(5)
    desk.until(lambda: desk.done == ["runs", "orders", "hold", "receipt"])


def test_kept_job_that_hangs_is_repeated(desk: Desk) -> None:
    desk.hang("hold", is_kept=True)
    desk.ask_to_record("receipt")
    desk.pass_time(61)
    desk.pass_time(5)
    desk.until(lambda: desk.done == ["hold", "receipt"])
    desk.let_go.set()
    desk.until(lambda: desk.done == ["hold", "receipt", "hold"])


def test_kept_job_is_dropped_if_it_fails_while_others_succeed(desk: Desk) -> None:
    desk.ask_to_record("hold", *["too long"] * 100)
    desk.ask_to_record("receipt")
    for _ in range(5):
        desk.until(lambda: not desk.worker._is_busy)
        desk.worker.ask(desk.job("runs"))
        desk.until(lambda: not desk.worker._is_busy)
        desk.pass_time(5)
    desk.until(lambda: "receipt" in desk.done)
    again = "hold failed and is retried: too long"
    assert desk.notes == [*[again] * 4, "hold failed: too long"]


def test_kept_job_outlasts_an_outage(desk: Desk) -> None:
    desk.ask_to_record("hold", *["connection refused"] * 20)
    for _ in range(20):
        desk.until(lambda: not desk.worker._is_busy)
        desk.pass_time(5)
    desk.until(lambda: desk.done == ["hold"])


def test_kept_jobs_are_limited_to_the_newest(desk: Desk) -> None:
    desk.hang("first")
    for number in range(250):
        desk.ask_to_record(str(number))
    desk.let_go.set()
    desk.until(lambda: "249" in desk.done)
    assert desk.done == ["first", *map(str, range(50, 250))]


def test_finish_repeats_a_kept_job(desk: Desk) -> None:
    desk.ask_to_record("left", "database is locked")
    desk.until(lambda: desk.notes)
    desk.until(lambda: not desk.worker._is_busy)
    desk.worker.finish(60)
    assert desk.done == ["left"]


def test_jobs_wait_for_a_thread_and_never_run_in_the_one_of_the_member(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", refuse)
        desk.worker.ask(desk.job("runs"))
        desk.pass_time(1)
        desk.pass_time(1)
    assert desk.done == []
    assert desk.notes == [
        "no thread could be started for Dagster's storage: can't start new thread"
    ]
    desk.pass_time(1)
    desk.until(lambda: desk.done == ["runs"])
