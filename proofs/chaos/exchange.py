"""The folder through which the command observes the runs and makes them fail.

Every run imports this module, so it imports almost nothing.
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
LETTERS = "numbers-dead"
"""The dead-letter topic."""
JOB = "kafka_batches"
SENSOR = f"{JOB}_sensor"
SESSION_TIMEOUT_S = 10

_NO_FILES = 3
"""Limit of open files below those that a process has open, so it can open no other one."""

FOLDER_VARIABLE = "CHAOS_FOLDER"
BROKERS_VARIABLE = "KAFKA_BROKERS"
PROTOCOL_VARIABLE = "KAFKA_GROUP_PROTOCOL"
PARTITIONS_VARIABLE = "KAFKA_GROUP_PARTITIONS"
SPARK_VARIABLE = "SPARK_CONNECT_URL"
SINK_VARIABLE = "CHAOS_SINK"
DATABASE_VARIABLE = "CHAOS_DATABASE"
BAD_VARIABLE = "CHAOS_BAD"
ROLE_VARIABLE = "CHAOS_ROLE"
STREAMING = "streaming"
"""The role of a code location with streaming runs."""
RUNS = 3
"""Number of streaming runs."""
HEARTBEAT_TIMEOUT_S = 20


@dataclass(frozen=True)
class Exchange:
    """The folder that runs and faults share."""

    root: Path

    @property
    def output(self) -> Path:
        """Output of the runs."""
        return self.root / "output"

    @property
    def _working(self) -> Path:
        return self.root / "working"

    @property
    def _failures(self) -> Path:
        return self.root / "failures"

    @property
    def noted(self) -> Path:
        """Output of the second asset of the runs."""
        return self.root / "noted"

    @property
    def fleeting(self) -> Path:
        """Output of the second group since its topic was created."""
        return self.root / "fleeting"

    def turn_page(self, life: int) -> None:
        """Move the output of the second group away: ranges of the new topic have the same keys."""
        self.fleeting.rename(self.root / f"fleeting before {life}")
        self.fleeting.mkdir()

    def page(self) -> list[int]:
        """Return the numbers in the output of the second group."""
        return [
            int(line) for path in self.fleeting.glob("*.txt") for line in path.read_text().split()
        ]

    @property
    def bodies(self) -> Path:
        """Folder of the runs' journals."""
        return self.root / "bodies"

    @property
    def _deploys(self) -> Path:
        return self.root / "deploys"

    def deploy(self) -> str:
        """Set a new version of the code for its next load, and return it."""
        self._deploys.write_text(f"{self.version}+")
        return self.version

    @property
    def version(self) -> str:
        """The version of the code."""
        return self._deploys.read_text() if self._deploys.exists() else "v"

    @property
    def _mended(self) -> Path:
        return self.root / "mended"

    def mend(self) -> None:
        """Deploy code that can process the bad records, except for those that stay bad."""
        self._mended.touch()

    @property
    def is_mended(self) -> bool:
        """Whether the code is mended."""
        return self._mended.exists()

    @property
    def _cut_off(self) -> Path:
        return self.root / "cut_off"

    @property
    def _refusal(self) -> Path:
        return self.root / "launches are refused"

    def make(self) -> None:
        """Create the folders."""
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
        """Register this process as the working process of a run."""
        self.show_process(run_id)
        try:
            yield
        finally:
            (self._working / run_id).unlink(missing_ok=True)

    def show_process(self, run_id: str) -> None:
        """Register this process as that of a run, also after its end."""
        (self._working / run_id).write_text(f"{os.getpid()} {_began_at(os.getpid())}")

    def working(self) -> dict[str, int]:
        """Return the process of each working run."""
        found = {}
        for note in self._working.iterdir():
            with suppress(OSError, ValueError):  # it has ended, or has just begun
                pid, began_at = map(int, note.read_text().split())
                # A pid is given out again, and may be that of Dagster's daemon.
                if _began_at(pid) == began_at:
                    found[note.name] = pid
        return found

    def send(self, run_id: str, number: signal.Signals) -> bool:
        """Send a signal to the process of a run; return False if it is gone."""
        pid = self.working().get(run_id)
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def kill(self, run_id: str) -> bool:
        """Kill the process of a run; return False if it is gone."""
        if not self.send(run_id, signal.SIGKILL):
            return False
        (self._working / run_id).unlink(missing_ok=True)
        return True

    def cut_off(self, run_id: str) -> bool:
        """Prevent a run's process from opening files and connections; return False if it is gone.

        Open files and connections stay open.
        """
        pid = self.working().get(run_id)
        if pid is None:
            return False
        (self._cut_off / run_id).touch()
        return _limit_files(pid, _NO_FILES)

    def reconnect(self, run_id: str) -> None:
        """Let the process of a run open files again, if it still exists."""
        pid = self.working().get(run_id)
        if pid is not None:
            _limit_files(pid, None)
        (self._cut_off / run_id).unlink(missing_ok=True)

    def is_cut_off(self, run_id: str) -> bool:
        """Return whether a run is cut off, without opening a file."""
        return (self._cut_off / run_id).exists()

    def refuse_launches(self) -> None:
        """Let the launcher refuse all runs."""
        self._refusal.touch()

    def allow_launches(self) -> None:
        """Let the launcher launch runs again."""
        self._refusal.unlink(missing_ok=True)

    @property
    def refuses_launches(self) -> bool:
        """Whether the launcher refuses runs."""
        return self._refusal.exists()

    def fail_next(self) -> None:
        """Let the next finishing run fail."""
        (self._failures / str(len(list(self._failures.iterdir())))).touch()

    def fail_if_wanted(self) -> None:
        """Raise an error if `fail_next` was called, once per call.

        Raises:
            ConnectionError: A failure was requested. No record is the cause.
        """
        for wanted in self._failures.iterdir():
            with suppress(FileNotFoundError):  # another run took it
                wanted.unlink()
                problem = "this run fails because a fault was wanted"
                raise ConnectionError(problem)


def _limit_files(pid: int, limit: int | None) -> bool:
    """Set a process's limit of open files, or reset it; return False if it is gone."""
    try:
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard if limit is None else limit, hard))
    except ProcessLookupError:
        return False
    return True


def _began_at(pid: int) -> int:
    """Return the start of a process, in clock ticks since the machine's boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
