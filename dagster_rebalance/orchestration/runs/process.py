"""The identity of the process of a run, and the proof that it is gone.

Only Linux provides that proof, and only to an observer on the same machine, in the same PID
namespace and with the same user. In all other cases the result is unknown. PIDs are reused, so the
identity includes the start time of the process.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import NoReturn

_PROC = Path("/proc")
_RUN_VARIABLE = "DAGSTER_REBALANCE_RUN"
"""An environment variable of all children of the process of a run, such as the JVM of Spark."""
_KILLED = 128 + 9
"""The exit code of a killed process in shells and containers."""
_FIELDS_BEFORE_START = 19
"""Between the state of a process and its start time, in `/proc/<pid>/stat`."""
_EXEC_LIMIT_S = 10.0
_END_LIMIT_MS = 5_000


def boot_time_s() -> float:
    """Return seconds that also pass while a laptop sleeps or a virtual machine is suspended.

    On Linux, `time.monotonic()` does not advance then.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def identity() -> str:
    """Return the identity of this process, unique across machines, containers and time."""
    started = _started(os.getpid())
    try:
        place = _place()
    except OSError:
        place = ""
    return f"{place}:{os.getpid()}:{started}" if place and started else f"?{uuid.uuid4().hex}"


def is_gone(process: str, run_id: str) -> bool:
    """Whether the process with this identity and its children for the run are proven to be gone."""
    local = _local(process)
    return local is not None and not _exists(*local) and not _has_children(run_id)


def kill(process: str) -> None:
    """Kill the process with this identity if it is local and executes one run; wait for its end."""
    local = _local(process)
    if local is None or local[0] == os.getpid() or not _is_started_for_one_run(local[0]):
        return
    pid, started = local
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # it is gone, or the kernel is older than 5.3
        return
    try:
        # The handle refers to one process, so the check detects a reused PID.
        if _started(pid) == started:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            _wait_for_end(handle, pid)
    finally:
        os.close(handle)


def claim_children(run_id: str) -> None:
    """Mark all future children of this process as children of the run."""
    os.environ[_RUN_VARIABLE] = run_id


def disown_children() -> None:
    """Stop marking the children of this process."""
    os.environ.pop(_RUN_VARIABLE, None)


def is_of_one_run() -> bool:
    """Whether a launcher of Dagster started this process for one run, so it may be killed."""
    commands = (["api", "execute_run"], ["api", "resume_run"])
    return multiprocessing.parent_process() is not None or sys.argv[1:3] in commands


def end_hard() -> NoReturn:
    """End this process at once, with all of its threads.

    A SIGKILL to itself is not enough: in a container the process of a run usually has PID 1, and
    the kernel ignores a SIGKILL from inside its namespace.
    """
    os._exit(_KILLED)


def _local(process: str) -> tuple[int, str] | None:
    """Return the PID and the start time of a process on this machine; None for other machines."""
    place, *numbers = process.rsplit(":", 2)
    if len(numbers) != len(("pid", "started")) or not identity().startswith(f"{place}:"):
        return None
    return int(numbers[0]), numbers[1]


def _is_started_for_one_run(pid: int) -> bool:
    """Whether Dagster's code server started another process for a run."""
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
    """Return the start of a process in ticks since boot; empty if that cannot be read."""
    try:
        # Its name precedes the fields, in parentheses, and may contain spaces.
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
                # It ended, or belongs to another user, so it is no child of the run.
                continue
            if wanted in environment.split(b"\0") or (
                not environment and _may_be_in_exec(folder.name)
            ):
                return True
    return False


def _may_be_in_exec(pid: str) -> bool:
    """Whether a process without an environment may be one that `execve` is about to start.

    Kernel threads and ended processes have no environment and no executable.
    """
    try:
        (_PROC / pid / "exe").readlink()
    except OSError:
        return False
    started = _started(int(pid)) or "0"
    return boot_time_s() - int(started) / os.sysconf("SC_CLK_TCK") < _EXEC_LIMIT_S
