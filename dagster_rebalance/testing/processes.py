"""Child processes with a log, a readiness check, and a guaranteed end.

Each child runs under `local/process_guard.py`, which ends it and its descendants when this process
ends, even by `kill -9`. Only own processes are signalled, by pid.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.testing.deadline import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

_GUARD = str(Path(__file__).parent / "local" / "process_guard.py")
_RUNNING: set[ChildProcess] = set()


class ChildProcess:
    """A program that runs until it is stopped, or until this process ends.

    Example:
        ```python
        command = ["dagster-webserver", "-p", str(port)]
        with ChildProcess("web", command, log=folder / "web.log") as web:
            web.wait_until_ready(lambda: answers(port), timeout_s=60)
        ```

    Attributes:
        name: Name for messages.
        log: File of its standard output and error.
        pid: Pid of the program, not of its guard.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Start `command` with `env` added to this process's environment; append to the log."""
        self.name = name
        self.log = log
        self._exit_code: int | None = None
        lifeline, self._lifeline = os.pipe()
        self._report, report = os.pipe()
        argv = [
            sys.executable,
            "-I",
            "-S",
            _GUARD,
            str(lifeline),
            str(report),
            *map(str, command),
        ]
        try:
            with log.open("ab") as output:
                self._guard = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    cwd=cwd,
                    pass_fds=(lifeline, report),
                    start_new_session=True,
                )
        finally:
            os.close(lifeline)
            os.close(report)
        _RUNNING.add(self)  # ended with this process from here on
        try:
            self.pid = int(self._read_line())
            os.set_blocking(self._report, False)
        except BaseException:  # Ctrl-C: the caller has no reference yet
            self.stop_at_once()
            raise

    def _read_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(self._report, 1)):
            line += byte
        return line

    @property
    def exit_code(self) -> int | None:
        """The program's exit code, negative after a signal; None while it runs."""
        if self._exit_code is None:
            try:
                line = self._read_line()
            except BlockingIOError:
                return None
            self._exit_code = int(line) if line else -signal.SIGKILL
        return self._exit_code

    @property
    def is_running(self) -> bool:
        """Whether the program runs; its children may run longer."""
        return self.exit_code is None

    @property
    def is_gone(self) -> bool:
        """Whether the program and every descendant of it have ended."""
        return self._guard.poll() is not None

    def tail(self, lines: int = 30) -> str:
        """Return the end of the log."""
        with self.log.open(errors="replace") as log:
            return "".join(deque(log, maxlen=lines))

    def wait_until_ready(self, is_ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait for `is_ready`.

        Raises:
            DagsterRebalanceError: The program ended, or the timeout expired. The message includes
                the end of the log.
        """
        try:
            wait_until(
                lambda: not self.is_running or is_ready(),
                timeout_s=timeout_s,
                what=f"{self.name} to be ready",
            )
        except DagsterRebalanceError as error:
            raise DagsterRebalanceError(self._with_tail(str(error))) from error
        if not self.is_running:
            raise DagsterRebalanceError(
                self._with_tail(
                    f"{self.name} ended with exit code {self.exit_code} before it was ready"
                )
            )

    def _with_tail(self, sentence: str) -> str:
        return f"{sentence}; {self.log} ends with:\n{self.tail()}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program, unless it has ended."""
        # The guard reports an exit when it reaps the pid, long before the system can reuse it.
        if self.is_running:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def wait(self, timeout_s: float) -> int:
        """Wait for the program to end, and return its exit code.

        Raises:
            DagsterRebalanceError: The timeout expired.
        """
        wait_until(
            lambda: not self.is_running,
            timeout_s=timeout_s,
            what=lambda: self._with_tail(f"{self.name} to end"),
        )
        return -signal.SIGKILL if self.exit_code is None else self.exit_code

    def kill(self) -> None:
        """Kill the program, as a crash would. Its child processes run until `stop`."""
        self.send(signal.SIGKILL)
        self.wait(60)

    def suspend(self) -> None:
        """Suspend the program, like a long pause of its machine, and wait until it is suspended."""
        self.send(signal.SIGSTOP)
        wait_until(
            lambda: _is_stopped(self.pid) or not self.is_running,
            timeout_s=60,
            what=f"{self.name} to be suspended",
            interval_s=0.001,
        )

    def resume(self) -> None:
        """Resume a suspended program."""
        self.send(signal.SIGCONT)

    def stop(self, *, timeout_s: float = 10, first: signal.Signals = signal.SIGTERM) -> None:
        """Ask the program to end, wait for it and its descendants, and kill them at the timeout."""
        if self._lifeline < 0:
            return
        self.send(first)
        self.resume()
        try:
            wait_until(
                lambda: self.is_gone,
                timeout_s=timeout_s,
                what=f"{self.name} to end",
                interval_s=0.02,
            )
        except DagsterRebalanceError:
            self._kill_tree()
        self._close()

    def stop_at_once(self) -> None:
        """Kill the program and all its descendants."""
        if self._lifeline >= 0:
            self._kill_tree()
            self._close()

    def _kill_tree(self) -> None:
        if not self.is_gone:
            with suppress(BrokenPipeError):  # the guard has just ended
                os.write(self._lifeline, b"!")
            self._guard.wait()

    def _close(self) -> None:
        _ = self.exit_code
        os.close(self._lifeline)
        os.close(self._report)
        self._lifeline = -1
        if self._exit_code is None:
            self._exit_code = -signal.SIGKILL
        _RUNNING.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _is_stopped(pid: int) -> bool:
    """Return whether all threads of a process are stopped; without /proc, assume so."""
    if not Path("/proc/self/task").is_dir():
        return True
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return False  # a thread, or the process, has just ended
    return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)


@atexit.register
def _stop_all() -> None:
    for child in list(_RUNNING):
        child.stop_at_once()
