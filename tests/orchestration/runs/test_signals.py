"""Signals and forks in the process of a run."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.orchestration.runs import signals
from dagster_rebalance.orchestration.runs.signals import Interruptions
from tests.orchestration.parts import fork_and_leave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _handlers_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def _in_a_run() -> Iterator[None]:
    with dg.DagsterInstance.ephemeral() as instance, signals.isolate_forks(instance):
        yield


def _get_signals() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)


def _handled_by(module: str) -> Callable[[int, FrameType | None], None]:
    def handler(*_: object) -> None:
        """Do nothing."""

    handler.__module__ = module
    return handler


@pytest.mark.usefixtures("_in_a_run")
@pytest.mark.parametrize(
    ("module", "code"), [("dagster._utils", -signal.SIGTERM), ("shop.assets", 0)]
)
def test_fork_has_default_handlers_in_place_of_those_of_the_run(module: str, code: int) -> None:
    """A pool ends its workers by SIGTERM."""
    signal.signal(signal.SIGTERM, _handled_by(module))
    assert fork_and_leave(_get_signals) == code


@pytest.mark.usefixtures("_in_a_run")
def test_fork_does_not_record_signals_of_the_run() -> None:
    noted = partial(Interruptions()._record, _handled_by("shop.assets"))
    signal.signal(signal.SIGTERM, noted)
    assert fork_and_leave(_get_signals) == -signal.SIGTERM


@pytest.mark.usefixtures("_in_a_run")
def test_signal_during_fork_reaches_the_child() -> None:
    """CPython drops it if a Python handler is set."""
    signal.signal(signal.SIGTERM, _handled_by("dagster"))
    signals._before()
    try:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= set(SIGNALS)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # another thread may not take it
        assert signal.sigpending() == {signal.SIGTERM}
    finally:
        signals._restore()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(SIGNALS)
    signals._restore()


def test_fork_outside_of_run_keeps_handlers() -> None:
    with dg.DagsterInstance.ephemeral() as instance, signals.isolate_forks(instance):
        pass
    signal.signal(signal.SIGTERM, _handled_by("dagster"))
    assert fork_and_leave(_get_signals) == 0
