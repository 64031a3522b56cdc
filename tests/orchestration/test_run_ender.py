"""Ending runs in the background: once at a time, all of them, and without losing an error."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

from dagster_rebalance.orchestration.run_ender import RunEnder, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from dagster_rebalance.orchestration.runs import RunLedger


class _Ledger:
    """Ends a run when the test lets it."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.asked: list[tuple[str, str]] = []
        self.may_go_on = threading.Event()
        self._problem = problem

    def cancel(self, run_id: str) -> None:
        self._ask("cancel", run_id)

    def end_dead(self, run_id: str) -> None:
        self._ask("end", run_id)

    def _ask(self, what: str, run_id: str) -> None:
        self.asked.append((what, run_id))
        self.may_go_on.wait(10)
        if self._problem is not None:
            raise self._problem


def _ender(ledger: _Ledger, note: Callable[[str], None] = lambda _text: None) -> tuple[RunEnder, list[threading.Thread]]:
    threads: list[threading.Thread] = []

    def start(_name: str, work: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()

    return RunEnder(cast("RunLedger", ledger), note, start), threads


def _wait(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(10)


def test_each_run_is_asked_for_once_at_a_time() -> None:
    """The core asks again and again; one that hangs keeps only those waiting that were asked for together with it."""
    ledger = _Ledger()
    ender, threads = _ender(ledger)
    ender.end_dead(["run-1", "run-2"])
    ender.end_dead(["run-1", "run-2", "run-3"])
    ender.cancel(["run-1"])
    assert len(threads) == 3
    ledger.may_go_on.set()
    _wait(threads)
    assert sorted(ledger.asked) == [("cancel", "run-1"), ("end", "run-1"), ("end", "run-2"), ("end", "run-3")]
    ender.end_dead(["run-1"])
    _wait(threads)
    assert ledger.asked[4:] == [("end", "run-1")]


def test_an_error_is_noted() -> None:
    """The next tick shows it; the core asks again."""
    notes: list[str] = []
    ledger = _Ledger(OSError("database is locked"))
    ledger.may_go_on.set()
    ender, threads = _ender(ledger, notes.append)
    ender.cancel(["run-1", "run-2"])
    _wait(threads)
    assert notes == ["cancelling run run-1 failed: database is locked", "cancelling run run-2 failed: database is locked"]


def test_a_process_that_is_about_to_end_does_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python lets no thread begin while its exit handlers run."""

    def refuse(_thread: threading.Thread) -> None:
        message = "can't create new thread at interpreter shutdown"
        raise RuntimeError(message)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = []
    in_thread("cancelling run-1", lambda: done.append("run-1"))
    assert done == ["run-1"]
