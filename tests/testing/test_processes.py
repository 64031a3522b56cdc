"""Child processes and their descendants end on request, and with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.processes import ChildProcess

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]

# A child whose own child is in a separate session, like a daemon: a signal to the process group
# does not reach it.
FAMILY_CODE = """
import subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], \
start_new_session=True)
print("grandchild", grandchild.pid, flush=True)
time.sleep(600)
"""
FAMILY = [sys.executable, "-c", FAMILY_CODE]

# More threads than the machine has cores: not all are seen by the one that stops them.
BUSY_CODE = """
import hashlib, threading
def work():
    while True:
        hashlib.sha256(bytes(100_000_000)).digest()
for _ in range(16):
    threading.Thread(target=work, daemon=True).start()
print("up", flush=True)
threading.Event().wait()
"""
BUSY = [sys.executable, "-c", BUSY_CODE]

STUBBORN_CODE = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""
STUBBORN = [sys.executable, "-c", STUBBORN_CODE]

# A runner in the background may ignore SIGTERM, which its children inherit.
PARENT = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_DFL)
from dagster_rebalance.testing.processes import ChildProcess
child = ChildProcess("family", sys.argv[2:], log=Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not collected yet does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def start(command: list[str], folder: Path) -> ChildProcess:
    """Start a command and wait until it has printed its first line."""
    child = ChildProcess("child", command, log=folder / "child.log")
    child.wait_until_ready(lambda: child.tail() != "", timeout_s=120)
    return child


def grandchild_of(log: Path) -> int:
    """The pid that the family's child has printed."""
    return int(
        wait_until(
            lambda: log.read_text().split() if log.exists() else None,
            timeout_s=120,
            what="the grandchild's pid",
        )[1]
    )


def test_stop_ends_a_child_with_sigterm(tmp_path: Path) -> None:
    child = start(SLEEP, tmp_path)
    child.stop(timeout_s=60)
    assert child.exit_code == -signal.SIGTERM
    assert not is_alive(child.pid)


def test_stop_kills_a_child_that_ignores_sigterm(tmp_path: Path) -> None:
    child = start(STUBBORN, tmp_path)
    child.stop(timeout_s=0.2)
    assert child.exit_code == -signal.SIGKILL
    assert not is_alive(child.pid)


def test_stop_ends_grandchildren_in_other_sessions(tmp_path: Path) -> None:
    child = start(FAMILY, tmp_path)
    grandchild = grandchild_of(child.log)
    child.stop(timeout_s=0.5)
    assert child.is_gone
    assert not is_alive(grandchild)


def test_suspend_waits_until_all_threads_are_stopped(tmp_path: Path) -> None:
    child = start(BUSY, tmp_path)
    for _ in range(10):
        child.suspend()
        stats = [(task / "stat") for task in Path(f"/proc/{child.pid}/task").iterdir()]
        states = [stat.read_text().rpartition(") ")[2][0] for stat in stats]
        assert set(states) == {"T"}
        child.resume()
    child.stop_at_once()


def test_stop_ends_a_suspended_child(tmp_path: Path) -> None:
    child = start(SLEEP, tmp_path)
    child.suspend()
    child.stop(timeout_s=60)
    assert child.exit_code == -signal.SIGTERM


def test_ctrl_c_during_a_start_kills_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def interrupted(child: ChildProcess) -> bytes:
        started.append(child)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(ChildProcess, "_read_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ChildProcess("sleep", SLEEP, log=tmp_path / "log")
    (child,) = started
    assert child.is_gone


def test_stop_is_idempotent(tmp_path: Path) -> None:
    child = start(SLEEP, tmp_path)
    child.stop()
    child.stop()
    child.stop_at_once()
    assert not child.is_running


def test_kill_ends_only_the_program(tmp_path: Path) -> None:
    child = start(FAMILY, tmp_path)
    grandchild = grandchild_of(child.log)
    child.kill()
    assert child.exit_code == -signal.SIGKILL
    assert is_alive(grandchild)
    assert not child.is_gone
    child.stop(timeout_s=0.2)
    assert not is_alive(grandchild)


def test_exit_code_is_that_of_the_program(tmp_path: Path) -> None:
    child = ChildProcess(
        "child", [sys.executable, "-c", "raise SystemExit(7)"], log=tmp_path / "log"
    )
    assert child.wait(120) == 7
    child.stop()
    assert child.exit_code == 7


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill -9", "kill"])
@pytest.mark.parametrize("command", [FAMILY, STUBBORN], ids=["family", "stubborn"])
def test_children_end_when_the_parent_is_killed(
    tmp_path: Path, command: list[str], number: signal.Signals
) -> None:
    """The kernel closes the parent's end of the guard's pipe."""
    log = tmp_path / "log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(log), *command], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    family = [int(parent.stdout.readline())]
    wait_until(
        lambda: log.exists() and log.read_text() != "", timeout_s=120, what="the child's first line"
    )
    if command is FAMILY:
        family.append(grandchild_of(log))
    assert all(is_alive(pid) for pid in family)
    parent.send_signal(number)
    parent.wait(120)
    parent.stdout.close()
    wait_until(
        lambda: not any(is_alive(pid) for pid in family), timeout_s=120, what=f"the end of {family}"
    )


def test_program_that_ends_before_it_is_ready_is_reported_with_its_log(
    tmp_path: Path,
) -> None:
    child = ChildProcess(
        "the web server",
        [sys.executable, "-c", "raise SystemExit('no such folder: /nowhere')"],
        log=tmp_path / "log",
    )
    with pytest.raises(
        DagsterRebalanceError,
        match=(
            r"the web server ended with exit code 1 before it was ready"
            r"(.|\n)*no such folder: /nowhere"
        ),
    ):
        child.wait_until_ready(lambda: False, timeout_s=120)
    child.stop()


def test_program_that_is_never_ready_is_reported_with_its_log(tmp_path: Path) -> None:
    child = start(SLEEP, tmp_path)
    with pytest.raises(
        DagsterRebalanceError, match=r"timed out after 0.1 s waiting for child to be ready(.|\n)*up"
    ):
        child.wait_until_ready(lambda: False, timeout_s=0.1)
    child.stop()


def test_missing_program_is_reported_in_the_log(tmp_path: Path) -> None:
    child = ChildProcess("child", ["/no/such/program"], log=tmp_path / "log")
    with pytest.raises(DagsterRebalanceError, match=r"cannot run /no/such/program: .*No such file"):
        child.wait_until_ready(lambda: False, timeout_s=120)
    child.stop()


def test_timeout_reports_the_last_state() -> None:
    seen: list[int] = []
    with pytest.raises(DagsterRebalanceError, match=r"waiting for 5 records; there are [1-9]"):
        wait_until(
            lambda: seen.append(1),
            timeout_s=0.05,
            what=lambda: f"5 records; there are {len(seen)}",
            interval_s=0.01,
        )
