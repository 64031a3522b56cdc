"""Shutdown of a code server.

Its members receive the request at once, not only when its runs are over.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.orchestration.per_batch.hosted_members import call_on_shutdown

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def told() -> Iterator[list[int]]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    seen: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: seen.append(number))
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_is_reported_before_the_earlier_handler_runs(
    told: list[int], number: signal.Signals
) -> None:
    call_on_shutdown(lambda: told.append(0))
    signal.raise_signal(number)
    assert told == [0, number]


def test_ignored_signal_stays_ignored(told: list[int]) -> None:
    """A background process of a shell ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    call_on_shutdown(lambda: told.append(0))
    signal.raise_signal(signal.SIGINT)
    assert told == []


def test_thread_can_watch_while_the_main_thread_waits() -> None:
    """In a code server ticks run in a pool."""
    script = """
        import os, signal, sys, threading, time
        from dagster_rebalance.orchestration.per_batch.hosted_members import call_on_shutdown

        def tick():
            call_on_shutdown(lambda: print("told", threading.current_thread() is \
threading.main_thread(), flush=True))
            while signal.getsignal(signal.SIGTERM) is dagsters:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

        def dagsters(number, frame):
            raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, dagsters)
        ended = threading.Event()
        threading.Thread(target=tick, daemon=True).start()
        try:
            while not ended.wait(0.1):
                pass
        except KeyboardInterrupt:
            print("interrupted")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("told True\ninterrupted\n", 0), done.stderr
