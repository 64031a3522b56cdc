"""What a process that a run forks has of its parent."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.orchestration.runs import forks
from dagster_rebalance.orchestration.runs.signals import Interruptions
from tests.orchestration.parts import fork_and_leave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _handlers_kept() -> Iterator[None]:
    """The handlers of this process are as before after the test."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def _in_a_run() -> Iterator[None]:
    """A run works in this process."""
    with dg.DagsterInstance.ephemeral() as instance, forks.apart(instance):
        yield


def _get_signals() -> None:
    """Get a signal, and end in order if it is handled."""
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)


def _handled_by(module: str) -> Callable[[int, FrameType | None], None]:
    """A handler of this module."""

    def handler(*_: object) -> None:
        """Do nothing."""

    handler.__module__ = module
    return handler


@pytest.mark.usefixtures("_in_a_run")
@pytest.mark.parametrize(
    ("module", "code"), [("dagster._utils", -signal.SIGTERM), ("shop.assets", 0)]
)
def test_a_child_has_the_default_handlers_in_place_of_those_of_the_run(
    module: str, code: int
) -> None:
    """A pool ends its workers by SIGTERM. Handlers of the user are meant for children, too."""
    signal.signal(signal.SIGTERM, _handled_by(module))
    assert fork_and_leave(_get_signals) == code


@pytest.mark.usefixtures("_in_a_run")
def test_a_child_does_not_note_signals_for_the_run() -> None:
    """The notes of interruptions wrap the handler that was there."""
    noted = partial(Interruptions()._note, _handled_by("shop.assets"))
    signal.signal(signal.SIGTERM, noted)
    assert fork_and_leave(_get_signals) == -signal.SIGTERM


@pytest.mark.usefixtures("_in_a_run")
def test_a_signal_that_comes_during_the_fork_reaches_the_child() -> None:
    """CPython drops it where a Python handler is set."""
    signal.signal(signal.SIGTERM, _handled_by("dagster"))
    forks._before()
    try:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= set(SIGNALS)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # another thread may not take it
        assert signal.sigpending() == {signal.SIGTERM}
    finally:
        forks._restore()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(SIGNALS)
    forks._restore()


def test_a_fork_outside_of_a_run_is_left_alone() -> None:
    """The code server forks as well, and other libraries."""
    with dg.DagsterInstance.ephemeral() as instance, forks.apart(instance):
        pass
    signal.signal(signal.SIGTERM, _handled_by("dagster"))
    assert fork_and_leave(_get_signals) == 0
