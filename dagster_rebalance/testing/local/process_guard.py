"""Script that runs one command and ends its process tree when the parent ends, even by `kill -9`.

Usage: `process_guard.py LIFELINE REPORT COMMAND...`. The parent holds the other end of the pipe
LIFELINE. When the parent ends, the pipe closes, and the tree receives SIGTERM, then SIGKILL. A byte
in the pipe requests SIGKILL at once. REPORT receives the command's pid, and later its exit code.
Orphans are adopted (PR_SET_CHILD_SUBREAPER). Standard library only: it runs without site-packages,
in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

GRACE_S = 3.0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    """Call prctl on Linux; elsewhere only the process group can be ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The parent's pid is the second field after the name in parentheses.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    descendants: list[int] = []
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        descendants += below
        todo += below
    return descendants


def _signal_tree(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    for pid in _descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _start(command: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(127)


class _Tree:
    """The command and all its descendants."""

    def __init__(self, root: int, report: int) -> None:
        self.root = root
        self.report = report

    def reap(self) -> bool:
        """Reap ended children and report the command's exit code; return False if none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.root:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self.report, f"{os.waitstatus_to_exitcode(status)}\n".encode())

    def end(self, *, at_once: bool) -> None:
        if not at_once:
            _signal_tree(self.root, signal.SIGTERM)
            _signal_tree(self.root, signal.SIGCONT)
        kill_at = time.monotonic() + (0 if at_once else GRACE_S)
        while self.reap():
            if time.monotonic() >= kill_at:
                _signal_tree(self.root, signal.SIGKILL)
            time.sleep(0.02)


def main(lifeline: int, report: int, command: list[str]) -> None:
    """Run the command until its process tree is gone, the parent requests its end, or ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    root = _start(command)
    os.write(report, f"{root}\n".encode())
    tree = _Tree(root, report)
    while tree.reap():
        ready, _, _ = select.select([lifeline, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        if lifeline in ready:
            tree.end(at_once=os.read(lifeline, 1) != b"")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
