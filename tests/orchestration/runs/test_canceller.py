"""Runs are cancelled in threads: one thread per run, and no error is lost."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.orchestration.runs.canceller import (
    MAX_REPLACED,
    MAX_THREADS,
    PATIENCE_S,
    SLOW_S,
    RunCanceller,
    in_thread,
)
from dagster_rebalance.testing.deadline import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable


class _Runs:
    def __init__(self, problem: Exception | None = None) -> None:
        self.asked: list[tuple[str, str]] = []
        self.may_go_on = threading.Event()
        self._problem = problem

    def cancel(self, run_id: str, *, only_unstarted: bool = False) -> None:
        self._ask("take back" if only_unstarted else "cancel", run_id)

    def end_dead(self, run_id: str, sign: str) -> bool:
        self._ask("end", run_id)
        return sign != "an old one"

    def _ask(self, what: str, run_id: str) -> None:
        self.asked.append((what, run_id))
        self.may_go_on.wait(120)
        if self._problem is not None:
            raise self._problem


class _Stage:
    def __init__(self, port: _Runs) -> None:
        self.threads: list[threading.Thread] = []
        self.notes: list[str] = []
        self.ended: list[str] = []
        self.now = 0.0
        self.ender = RunCanceller(
            port, self.notes.append, self.ended.append, self._start, lambda: self.now
        )

    def _start(self, _name: str, work: Callable[[], None]) -> None:
        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()

    def wait(self) -> None:
        for thread in self.threads:
            thread.join(120)


def test_run_is_cancelled_by_one_thread_at_a_time() -> None:
    port = _Runs()
    stage = _Stage(port)
    stage.ender.end_dead({"run-1": "", "run-2": ""})
    stage.ender.end_dead({"run-1": "", "run-2": "", "run-3": ""})
    stage.ender.cancel(["run-1"])
    port.may_go_on.set()
    stage.wait()
    assert sorted(port.asked) == [
        ("cancel", "run-1"),
        ("end", "run-1"),
        ("end", "run-2"),
        ("end", "run-3"),
    ]
    assert sorted(stage.ended) == ["run-1", "run-2", "run-3"]
    stage.ender.end_dead({"run-1": ""})
    stage.wait()
    assert port.asked[4:] == [("end", "run-1")]


def test_slow_launcher_does_not_block_other_runs() -> None:
    port = _Runs()
    stage = _Stage(port)
    stage.ender.cancel([f"run-{number}" for number in range(20)])
    wait_until(
        lambda: len(port.asked) == MAX_THREADS, timeout_s=120, what="as many as are done at once"
    )
    assert len(stage.threads) == MAX_THREADS
    port.may_go_on.set()
    stage.wait()
    assert len(port.asked) == 20


def test_hanging_task_is_retried_in_another_thread() -> None:
    port = _Runs()
    stage = _Stage(port)
    runs = [f"run-{number}" for number in range(MAX_THREADS)]
    stage.ender.end_dead(dict.fromkeys(runs, ""))
    wait_until(lambda: len(port.asked) == MAX_THREADS, timeout_s=120, what="all threads to hang")
    stage.now = SLOW_S - 1
    stage.ender.end_dead({"run-0": "", "another": ""})
    assert len(stage.threads) == MAX_THREADS
    stage.now = SLOW_S
    stage.ender.end_dead({"run-0": ""})
    wait_until(
        lambda: port.asked[MAX_THREADS:] == [("end", "another")],
        timeout_s=120,
        what="the other run to be asked for",
    )
    stage.now = PATIENCE_S
    stage.ender.end_dead({"run-0": ""})
    wait_until(
        lambda: len(port.asked) == MAX_THREADS + 2, timeout_s=120, what="both to be asked for"
    )
    assert port.asked[MAX_THREADS + 1 :] == [("end", "run-0")]
    assert sorted(stage.notes) == [
        f"ending run {run} hangs without an answer. It is retried in another thread" for run in runs
    ]
    port.may_go_on.set()
    stage.wait()
    assert not any(thread.is_alive() for thread in stage.threads)
    assert len(port.asked) == MAX_THREADS + 2, "a thread that was given up takes no other run"


def test_patience_doubles_only_for_the_run_that_hangs_again() -> None:
    port = _Runs()
    stage = _Stage(port)
    runs = dict.fromkeys([f"run-{number}" for number in range(MAX_THREADS)], "")
    stage.ender.end_dead(runs)
    wait_until(lambda: len(port.asked) == MAX_THREADS, timeout_s=120, what="all threads to hang")
    stage.now = PATIENCE_S
    stage.ender.end_dead(runs)
    wait_until(
        lambda: len(port.asked) == 2 * MAX_THREADS, timeout_s=120, what="all to be asked for again"
    )
    stage.now = 3 * PATIENCE_S - 1
    stage.ender.end_dead(runs)
    assert len(stage.threads) == 2 * MAX_THREADS, "twice as much patience"
    stage.now = 3 * PATIENCE_S
    stage.ender.end_dead(runs)
    wait_until(
        lambda: len(port.asked) == 3 * MAX_THREADS,
        timeout_s=120,
        what="all to be asked for once more",
    )
    port.may_go_on.set()
    stage.wait()


def test_hanging_run_holds_bounded_number_of_threads() -> None:
    port = _Runs()
    stage = _Stage(port)
    while stage.now < 2 * 86_400:
        stage.ender.end_dead({"run-1": ""})
        wait_until(
            lambda: len(port.asked) == len(stage.threads), timeout_s=120, what="each thread to ask"
        )
        stage.now += PATIENCE_S
    assert len(stage.threads) == MAX_REPLACED + 1
    port.may_go_on.set()
    stage.wait()
    assert not any(thread.is_alive() for thread in stage.threads)


def test_silent_launchers_hold_bounded_number_of_threads() -> None:
    port = _Runs()
    stage = _Stage(port)
    for stage.now in (0.0, SLOW_S, 2 * SLOW_S, 3 * SLOW_S, 4 * SLOW_S, 5 * SLOW_S):
        stage.ender.cancel([f"run-{number}" for number in range(100)])
        wait_until(
            lambda: len(port.asked) == len(stage.threads), timeout_s=120, what="each thread to ask"
        )
    assert len(stage.threads) == 16
    port.may_go_on.set()
    stage.wait()


def test_error_of_cancel_is_noted() -> None:
    port = _Runs(OSError("database is locked"))
    port.may_go_on.set()
    stage = _Stage(port)
    stage.ender.cancel(["run-1"])
    stage.ender.end_dead({"run-2": ""})
    stage.wait()
    assert sorted(stage.notes) == [
        "cancelling run run-1 failed: database is locked",
        "ending run run-2 failed: database is locked",
    ]
    assert not stage.ended


def test_error_of_many_lines_is_noted_in_one_line() -> None:
    port = _Runs(OSError("server closed the connection\n\tbefore the request\n[SQL: SELECT 1]"))
    port.may_go_on.set()
    stage = _Stage(port)
    stage.ender.cancel(["run-1"], only_unstarted=True)
    stage.wait()
    text = "server closed the connection before the request [SQL: SELECT 1]"
    assert stage.notes == [f"taking back run run-1 failed: {text}"]


def test_live_run_is_not_reported_as_ended() -> None:
    port = _Runs()
    port.may_go_on.set()
    stage = _Stage(port)
    stage.ender.end_dead({"run-1": "an old one"})
    stage.wait()
    assert stage.notes == ["run run-1 is not dead: it has sent another heartbeat"]
    assert not stage.ended


def test_work_runs_inline_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python starts no thread while its exit handlers run."""

    def refuse(_thread: threading.Thread) -> None:
        message = "can't create new thread at interpreter shutdown"
        raise RuntimeError(message)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = []
    in_thread("cancelling run-1", lambda: done.append("run-1"))
    assert done == ["run-1"]


def refuse(_thread: threading.Thread) -> None:
    message = "can't start new thread"
    raise RuntimeError(message)


def test_work_is_refused_if_the_process_has_too_many_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The member would wait for a launcher."""
    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[str] = []
    with pytest.raises(RuntimeError, match="can't start new thread"):
        in_thread("cancelling run-1", lambda: done.append("run-1"))
    assert not done


def test_run_is_cancelled_once_a_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    port = _Runs()
    port.may_go_on.set()
    stage = _Stage(port)
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", refuse)
        stage.ender.cancel(["run-1"])
    assert stage.notes == ["no thread could be started to end runs: can't start new thread"]
    stage.threads.clear()
    stage.ender.cancel(["run-1"])
    stage.wait()
    assert port.asked == [("cancel", "run-1")]
