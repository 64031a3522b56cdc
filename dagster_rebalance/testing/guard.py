"""Runs one command and makes sure that nothing of it outlives the process that asked for it.

Owns the end of a process tree. Started by `processes.py` as a script of its own: `guard.py LIFELINE
REPORT COMMAND...`. The parent holds the other end of the pipe LIFELINE, so the kernel itself says
when the parent is gone, also after `kill -9`: then the tree is asked to end, and after a moment
made to. One byte in the pipe means "make it end now". REPORT gets the command's pid, and its exit
code later. Orphans of the command are handed to the guard (PR_SET_CHILD_SUBREAPER), so "no child
left" means that the whole tree is gone. Imports nothing but the standard library: it runs without
site-packages, and must start in a few milliseconds.
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
    """Linux only. Elsewhere the process group alone is what can be ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _descendants() -> list[int]:
    """The pids of all descendants of this process."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold anything; the parent's pid is the second field after
            # it.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


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
    """The command and all its descendants, seen from above."""

    def __init__(self, root: int, report: int) -> None:
        self.root = root
        self.report = report

    def reap(self) -> bool:
        """Collect the children that have ended, and report the command's own exit code.

        Return False when no child is left.
        """
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
    """Run the command until its tree is gone, or the parent ends it or is gone itself."""
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
