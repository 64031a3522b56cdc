"""Ctrl-C while a command starts, works and ends."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.cli import app
from proofs.demo.streaming.parts import start_together
from proofs.interrupts import SIGNALS, Interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    """Installed for one test."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    made = Interrupts()
    made.install()
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_termination_signal_interrupts(interrupts: Interrupts, number: signal.Signals) -> None:
    assert interrupts is not None
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_signal_waits_for_the_end_of_a_deferred_call(interrupts: Interrupts) -> None:
    done = []

    def call() -> None:
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest of the call")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert done


def test_deferred_call_without_a_signal_returns(interrupts: Interrupts) -> None:
    with interrupts.deferred():
        pass


class Slow:
    """A part that takes a moment to start, and notes whether it had when it was stopped."""

    def __init__(self) -> None:
        self.is_started = False
        self.stopped: list[bool] = []

    def start(self) -> None:
        """Take a moment."""
        threading.Event().wait(0.1)
        self.is_started = True

    def stop(self) -> None:
        """Note how far it was."""
        self.stopped.append(self.is_started)


def test_part_does_not_start_after_it_was_stopped(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread pool loses a thread that is interrupted in its start."""
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        signal.raise_signal(signal.SIGINT)

    parts = [Slow(), Slow()]

    def play() -> None:
        with ExitStack() as stack:
            start_together(stack, parts, interrupts)

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        play()
    assert [part.stopped for part in parts] == [[True], [True]]


def test_second_ctrl_c_does_not_disturb_the_shutdown(interrupts: Interrupts) -> None:
    interrupts.end()
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_during_imports_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "build_app", interrupted)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""
