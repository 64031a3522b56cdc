"""The process of a run has an identity, which shows whether it still exists.

This module owns that identity, the proof that a process is gone, and whether a process may be ended
hard. Only Linux gives that proof, and only to an observer on the same machine, in the same
namespace of process ids and with the same user. In all other cases nothing is known. Systems use
ids of processes again, so the start time of the process belongs to its name.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import uuid
from pathlib import Path
from typing import NoReturn

_PROC = Path("/proc")
_RUN_VARIABLE = "DAGSTER_REBALANCE_RUN"
"""In the environment of all that the process of a run starts, a JVM of Spark for example."""
_KILLED = 128 + 9
"""The exit code of a process that was killed, as shells and containers tell it."""
_FIELDS_BEFORE_START = 19
"""Between the state of a process and its start time, in `/proc/<pid>/stat`."""
_END_LIMIT_MS = 5_000
"""How long the kernel has for the end of a killed process."""


def identity() -> str:
    """Return the name of this process.

    No process on another machine, in another container, or at another time has the same name.
    """
    started = _started(os.getpid())
    try:
        place = _place()
    except OSError:
        place = ""
    return f"{place}:{os.getpid()}:{started}" if place and started else f"?{uuid.uuid4().hex}"


def is_gone(process: str, run_id: str) -> bool:
    """Tell whether a process and all that it started for its run certainly do not exist any more.

    `process` is the name that the process gave itself.
    """
    here = _here(process)
    return here is not None and not _exists(*here) and not _has_children(run_id)


def kill(process: str) -> None:
    """Kill a process that exists for one run on this machine, and wait for its end.

    The function leaves all other processes alone. `process` is the name that the process gave
    itself.

    Raises:
        TimeoutError: The kernel has not ended the process.
    """
    here = _here(process)
    if here is None or here[0] == os.getpid() or not _is_started_for_one_run(here[0]):
        return
    pid, started = here
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # it is gone, or the kernel is older than 5.3
        return
    try:
        # The handle stays with its process. So a second process with this id is found here.
        if _started(pid) == started:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            _wait_for_end(handle, pid)
    finally:
        os.close(handle)


def claim_children(run_id: str) -> None:
    """Let all that this process starts from now on be known as the run's."""
    os.environ[_RUN_VARIABLE] = run_id


def disown_children() -> None:
    """Let what this process starts from now on be nobody's."""
    os.environ.pop(_RUN_VARIABLE, None)


def is_of_one_run() -> bool:
    """Tell whether this process exists for one run, as Dagster's launchers start it.

    Ending such a process hard hurts no other run.
    """
    commands = (["api", "execute_run"], ["api", "resume_run"])
    return multiprocessing.parent_process() is not None or sys.argv[1:3] in commands


def end_hard() -> NoReturn:
    """End this process at once, with all of its threads.

    Not by a SIGKILL of its own: in a container the process of a run usually is the first one of
    its namespace of process ids, and the kernel keeps such a process from killing itself.
    """
    os._exit(_KILLED)


def _here(process: str) -> tuple[int, str] | None:
    """Return the id and the start time of a process of this machine; None of any other one."""
    place, *numbers = process.rsplit(":", 2)
    if len(numbers) != len(("pid", "started")) or not identity().startswith(f"{place}:"):
        return None
    return int(numbers[0]), numbers[1]


def _is_started_for_one_run(pid: int) -> bool:
    """Tell whether another process is one that Dagster's code server starts for a run."""
    try:
        return b"multiprocessing." in (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def _wait_for_end(handle: int, pid: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    if not poll.poll(_END_LIMIT_MS):
        msg = f"process {pid} was killed and has not ended within {_END_LIMIT_MS} ms"
        raise TimeoutError(msg)


def _place() -> str:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{(_PROC / 'self/ns/pid').readlink()}:{os.geteuid()}"


def _exists(pid: int, started: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _started(pid) in {started, ""}


def _started(pid: int) -> str:
    """Return when a process was started, in ticks since the start of the machine.

    The result is empty when that cannot be read.
    """
    try:
        # Its name comes before, in parentheses, and may have spaces in it.
        return (
            (_PROC / str(pid) / "stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()[_FIELDS_BEFORE_START]
        )
    except (OSError, IndexError):
        return ""


def _has_children(run_id: str) -> bool:
    wanted = f"{_RUN_VARIABLE}={run_id}".encode()
    for folder in _PROC.iterdir():
        if folder.name.isdecimal():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                # It ended, or belongs to another user, so that no run of ours has started it.
                continue
            if wanted in environment.split(b"\0"):
                return True
    return False
