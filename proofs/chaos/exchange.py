"""What the command and the runs that it plays with have in common: names, and a folder.

Owns how runs are seen at work, and how they are told to fail. Imports next to nothing: every run
waits for it.
"""

from __future__ import annotations

import os
import resource
import signal
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TOPIC = GROUP = "numbers"
FLEETING = "fleeting"
JOB = "kafka_batches"
SENSOR = f"{JOB}_sensor"
SESSION_TIMEOUT_S = 10

_NO_FILES = 3
"""Below all files and sockets that a process has open: it can open no other one."""

FOLDER_VARIABLE = "CHAOS_FOLDER"
BROKERS_VARIABLE = "KAFKA_BROKERS"
PROTOCOL_VARIABLE = "KAFKA_GROUP_PROTOCOL"
SPARK_VARIABLE = "SPARK_CONNECT_URL"
SINK_VARIABLE = "CHAOS_SINK"
ROLE_VARIABLE = "CHAOS_ROLE"
STREAMING = "streaming"
"""The role of a code location with streaming runs."""
RUNS = 3
"""How many streaming runs share the partitions."""
HEARTBEAT_TIMEOUT_S = 20


@dataclass(frozen=True)
class Exchange:
    """The folder that runs and faults share.

    Attributes:
        root: The folder.
    """

    root: Path

    @property
    def output(self) -> Path:
        """What the runs wrote."""
        return self.root / "output"

    @property
    def _working(self) -> Path:
        return self.root / "working"

    @property
    def _failures(self) -> Path:
        return self.root / "failures"

    @property
    def noted(self) -> Path:
        """What the second asset of the runs wrote."""
        return self.root / "noted"

    @property
    def fleeting(self) -> Path:
        """What the runs of the second group wrote since its topic was made."""
        return self.root / "fleeting"

    def turn_page(self, life: int) -> None:
        """Move the output of the second group away.

        Its topic has been made again, and ranges will have the same keys.
        """
        self.fleeting.rename(self.root / f"fleeting before {life}")
        self.fleeting.mkdir()

    def page(self) -> list[int]:
        """The numbers in the output of the second group."""
        return [
            int(line) for path in self.fleeting.glob("*.txt") for line in path.read_text().split()
        ]

    @property
    def bodies(self) -> Path:
        """What the batches of each run noted of themselves."""
        return self.root / "bodies"

    @property
    def _deploys(self) -> Path:
        return self.root / "deploys"

    def deploy(self) -> str:
        """Let the code have a new version from the next time on that it is loaded; which."""
        self._deploys.write_text(f"{self.version}+")
        return self.version

    @property
    def version(self) -> str:
        """The version of the code."""
        return self._deploys.read_text() if self._deploys.exists() else "v"

    @property
    def _cut_off(self) -> Path:
        return self.root / "cut_off"

    @property
    def _refusal(self) -> Path:
        return self.root / "launches are refused"

    def make(self) -> None:
        """Make its folders."""
        for folder in (
            self.output,
            self.noted,
            self.fleeting,
            self.bodies,
            self._working,
            self._failures,
            self._cut_off,
        ):
            folder.mkdir(parents=True)

    @contextmanager
    def at_work(self, run_id: str) -> Iterator[None]:
        """Show that this process works on a run."""
        self.show_process(run_id)
        try:
            yield
        finally:
            (self._working / run_id).unlink(missing_ok=True)

    def show_process(self, run_id: str) -> None:
        """Show that this process is that of a run, also when it has ended.

        So a reader has to look whether it lives.
        """
        (self._working / run_id).write_text(f"{os.getpid()} {_began_at(os.getpid())}")

    def working(self) -> dict[str, int]:
        """The process of each run that works."""
        found = {}
        for note in self._working.iterdir():
            with suppress(OSError, ValueError):  # it ended meanwhile, or has just begun
                pid, began_at = map(int, note.read_text().split())
                # A pid is given out again, and may by now be that of Dagster's daemon.
                if _began_at(pid) == began_at:
                    found[note.name] = pid
        return found

    def send(self, run_id: str, number: signal.Signals) -> bool:
        """Send a signal to the process of a run; False when it is gone."""
        pid = self.working().get(run_id)
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def kill(self, run_id: str) -> bool:
        """End the process of a run at once; False when it is gone."""
        if not self.send(run_id, signal.SIGKILL):
            return False
        (self._working / run_id).unlink(missing_ok=True)
        return True

    def cut_off(self, run_id: str) -> bool:
        """Keep the process of a run from opening any file or connection; False when it is gone.

        What is open stays open.
        """
        pid = self.working().get(run_id)
        if pid is None:
            return False
        (self._cut_off / run_id).touch()
        return _limit_files(pid, _NO_FILES)

    def reconnect(self, run_id: str) -> None:
        """Let the process of a run open files again, if it is still there."""
        pid = self.working().get(run_id)
        if pid is not None:
            _limit_files(pid, None)
        (self._cut_off / run_id).unlink(missing_ok=True)

    def is_cut_off(self, run_id: str) -> bool:
        """Whether a run is cut off. Opens no file."""
        return (self._cut_off / run_id).exists()

    def refuse_launches(self) -> None:
        """Let the launcher refuse all runs."""
        self._refusal.touch()

    def allow_launches(self) -> None:
        """Let the launcher launch again."""
        self._refusal.unlink(missing_ok=True)

    @property
    def refuses_launches(self) -> bool:
        """Whether the launcher shall refuse."""
        return self._refusal.exists()

    def fail_next(self) -> None:
        """Let the next run that comes to its end fail."""
        (self._failures / str(len(list(self._failures.iterdir())))).touch()

    def fail_if_wanted(self) -> None:
        """End a run badly if that is wanted, once for each time.

        Raises:
            RuntimeError: It is.
        """
        for wanted in self._failures.iterdir():
            with suppress(FileNotFoundError):  # another run took it
                wanted.unlink()
                problem = "this run fails because a fault was wanted"
                raise RuntimeError(problem)


def _limit_files(pid: int, limit: int | None) -> bool:
    """Set how many files a process may have open; False when the process is gone.

    None sets the limit back to the process's hard limit.
    """
    try:
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard if limit is None else limit, hard))
    except ProcessLookupError:
        return False
    return True


def _began_at(pid: int) -> int:
    """When a process began, in clock ticks since the machine was started."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
