"""The proof that the process of a run is gone, and the end of one that is silent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.orchestration.runs import process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

RUN = "b1946ac9"


def _tell_and_wait(pipe: Connection) -> None:
    """Be a process that a code server has started for a run."""
    pipe.send(process.identity())
    threading.Event().wait()


class Started:
    """A process that waits, as Dagster's code server starts one for each run."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self.process = context.Process(target=_tell_and_wait, args=(there,))
        self.process.start()
        assert here.poll(60)
        self.name: str = here.recv()
        self.pid = self.process.pid or 0

    def is_alive(self) -> bool:
        """Whether it is there, frozen or not."""
        return self.process.is_alive()


@pytest.fixture
def started() -> Iterator[Started]:
    """A process of a run."""
    made = Started()
    yield made
    made.process.kill()
    made.process.join(60)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_silent_process_of_this_machine_is_gone_after_the_kill(
    started: Started, *, is_frozen: bool
) -> None:
    """A frozen process would work on beside the next run of its batch when it wakes up."""
    if is_frozen:
        os.kill(started.pid, signal.SIGSTOP)
    assert not process.is_gone(started.name, RUN)
    process.kill(started.name)
    assert not started.is_alive()
    assert process.is_gone(started.name, RUN)
    process.kill(started.name)


@pytest.mark.parametrize("started_at", ["0", "1", "99999999999"])
def test_a_process_that_has_the_id_of_an_earlier_one_is_not_killed(
    started: Started, started_at: str
) -> None:
    """Systems use ids again."""
    process.kill(f"{started.name.rpartition(':')[0]}:{started_at}")
    assert started.is_alive()


@pytest.mark.parametrize("place", ["", "?", "another-boot:pid:[4026531836]:1000"])
def test_a_process_of_another_place_is_not_killed(started: Started, place: str) -> None:
    """Its id is that of an unrelated process here."""
    _, *numbers = started.name.rsplit(":", 2)
    process.kill(":".join((place, *numbers)))
    process.kill(place)
    assert started.is_alive()


def test_a_process_that_does_more_than_one_run_is_not_killed() -> None:
    """A run can be executed in the process of a person, which would end with all its work."""
    process.kill(process.identity())
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        place = process.identity().rsplit(":", 2)[0]
        process.kill(f"{place}:{other.pid}:{process._started(other.pid)}")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(60)


def test_a_process_is_left_alone_where_the_kernel_cannot_name_it_for_good(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look and a kill by its id, another process may take that id."""

    def refuse(_pid: int) -> int:
        raise OSError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    process.kill(started.name)
    assert started.is_alive()


def test_a_process_that_the_kernel_does_not_end_is_reported(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for a dead disk goes on afterwards, so its batch must wait."""
    monkeypatch.setattr(process, "_END_LIMIT_MS", 1)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    with pytest.raises(TimeoutError, match=f"process {started.pid} was killed and has not ended"):
        process.kill(started.name)


def test_a_run_whose_process_is_gone_is_not_gone_before_its_children(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JVM of a local Spark outlives its driver, and goes on writing."""
    monkeypatch.setenv("DAGSTER_REBALANCE_RUN", "before")
    process.claim_children(RUN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        process.kill(started.name)
        started.process.join(60)
        assert not Path(f"/proc/{started.pid}").exists()
        assert not process.is_gone(started.name, RUN)
        assert process.is_gone(started.name, "another run")
    finally:
        child.kill()
        child.wait(60)
    assert process.is_gone(started.name, RUN)
