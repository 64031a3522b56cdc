"""The heartbeat of a run, in this very process: it is the process that is interrupted."""

from __future__ import annotations

import itertools
import logging
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.orchestration import heartbeat as heartbeat_module
from dagster_rebalance.orchestration.heartbeat import Heartbeat
from dagster_rebalance.orchestration.tags import HEARTBEAT_TAG
from dagster_rebalance.testing.deadline import wait_until
from tests.orchestration.parts import make_run, offer, tags_of

if TYPE_CHECKING:
    from collections.abc import Iterator

Status = dg.DagsterRunStatus
QUICK_S = 0.01


@pytest.fixture
def interrupts() -> Iterator[list[int]]:
    """The SIGTERMs that this process got."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def test_the_sign_of_life_changes_while_the_run_works(instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign that stays the same is what a dead process shows."""
    times = itertools.count(100)
    monkeypatch.setattr(heartbeat_module, "time", SimpleNamespace(time=lambda: next(times)))
    run = make_run(instance, offer(batch_id), Status.STARTED)
    with Heartbeat(instance, run.run_id, interval_s=QUICK_S):
        wait_until(lambda: int(tags_of(instance, run).get(HEARTBEAT_TAG, 0)) > 101, timeout_s=30, what="two beats")
    last = tags_of(instance, run)[HEARTBEAT_TAG]
    assert int(last) == next(times) - 1, "nothing beats after the end"


@pytest.mark.parametrize("status", [Status.FAILURE, Status.CANCELED])
def test_a_run_that_was_taken_for_dead_is_interrupted(
    instance: dg.DagsterInstance, batch_id: str, interrupts: list[int], status: dg.DagsterRunStatus
) -> None:
    """A process that was suspended must not go on: its batch has been requested again."""
    run = make_run(instance, offer(batch_id), status)
    with Heartbeat(instance, run.run_id, interval_s=QUICK_S):
        wait_until(lambda: interrupts, timeout_s=30, what="the interrupt")
    assert interrupts == [signal.SIGTERM], "once is enough"
    assert HEARTBEAT_TAG not in tags_of(instance, run)


def test_a_run_that_is_being_cancelled_still_gives_signs(instance: dg.DagsterInstance, batch_id: str, interrupts: list[int]) -> None:
    """It may work until Dagster shows it as cancelled, and Dagster interrupts it by itself."""
    run = make_run(instance, offer(batch_id), Status.CANCELING)
    with Heartbeat(instance, run.run_id, interval_s=QUICK_S):
        wait_until(lambda: tags_of(instance, run).get(HEARTBEAT_TAG), timeout_s=30, what="a beat")
    assert not interrupts


def test_a_beat_that_fails_is_tried_again(instance: dg.DagsterInstance, caplog: pytest.LogCaptureFixture) -> None:
    """The database may be away for a moment; the run goes on."""
    with caplog.at_level(logging.WARNING), Heartbeat(instance, "no-such-run", interval_s=QUICK_S):
        wait_until(lambda: caplog.text.count("could not give a sign of life") > 1, timeout_s=30, what="two failed beats")
