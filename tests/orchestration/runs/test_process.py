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
    pipe.send(process.identity())
    threading.Event().wait()


class Started:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self.process = context.Process(target=_tell_and_wait, args=(there,))
        self.process.start()
        assert here.poll(200)
        self.name: str = here.recv()
        self.pid = self.process.pid or 0

    def is_alive(self) -> bool:
        return self.process.is_alive()


@pytest.fixture
def started() -> Iterator[Started]:
    made = Started()
    yield made
    made.process.kill()
    made.process.join(120)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_local_process_is_gone_after_kill(started: Started, *, is_frozen: bool) -> None:
    if is_frozen:
        os.kill(started.pid, signal.SIGSTOP)
    assert not process.is_gone(started.name, RUN)
    process.kill(started.name)
    assert not started.is_alive()
    assert process.is_gone(started.name, RUN)
    process.kill(started.name)


@pytest.mark.parametrize("started_at", ["0", "1", "99999999999"])
def test_process_with_reused_pid_is_not_killed(started: Started, started_at: str) -> None:
    process.kill(f"{started.name.rpartition(':')[0]}:{started_at}")
    assert started.is_alive()


@pytest.mark.parametrize("place", ["", "?", "another-boot:pid:[4026531836]:1000"])
def test_process_of_another_machine_is_not_killed(started: Started, place: str) -> None:
    _, *numbers = started.name.rsplit(":", 2)
    process.kill(":".join((place, *numbers)))
    process.kill(place)
    assert started.is_alive()


def test_process_of_several_runs_is_not_killed() -> None:
    process.kill(process.identity())
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        place = process.identity().rsplit(":", 2)[0]
        process.kill(f"{place}:{other.pid}:{process._started(other.pid)}")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(120)


def test_process_is_not_killed_without_pidfd(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int) -> int:
        raise OSError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    process.kill(started.name)
    assert started.is_alive()


def test_process_that_survives_kill_is_reported(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_END_LIMIT_MS", 1)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    with pytest.raises(TimeoutError, match=f"process {started.pid} was killed and has not ended"):
        process.kill(started.name)


def test_run_is_not_gone_before_its_child_processes(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JVM of a local Spark outlives its driver."""
    monkeypatch.setenv("DAGSTER_REBALANCE_RUN", "before")
    process.claim_children(RUN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        process.kill(started.name)
        started.process.join(120)
        assert not Path(f"/proc/{started.pid}").exists()
        assert not process.is_gone(started.name, RUN)
        assert process.is_gone(started.name, "another run")
    finally:
        child.kill()
        child.wait(120)
    assert process.is_gone(started.name, RUN)


@pytest.mark.parametrize(
    ("age_s", "has_executable", "is_gone"), [(0, True, False), (60, True, True), (0, False, True)]
)
def test_run_is_not_gone_while_a_child_may_be_in_exec(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    age_s: int,
    has_executable: bool,
    is_gone: bool,
) -> None:
    """Until its environment is set, a new process may be one of the run."""
    ticks = int((process.boot_time_s() - age_s) * os.sysconf("SC_CLK_TCK"))
    child = tmp_path / "7"
    child.mkdir()
    (child / "environ").touch()
    (child / "stat").write_text(f"7 (java) {'0 ' * 19}{ticks} 0")
    if has_executable:
        (child / "exe").symlink_to("/usr/bin/java")
    monkeypatch.setattr(process, "_PROC", tmp_path)
    assert process._has_children(RUN) is not is_gone
