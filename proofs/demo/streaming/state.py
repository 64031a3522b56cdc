"""The state of the story: partitions from Kafka's records, runs and events from Dagster."""

from __future__ import annotations

import enum
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.orchestration.storage.run_tags import VERSION_TAG
from proofs.demo.streaming.parts import GROUP, JOB, PARTITIONS, TOPIC
from proofs.demo.streaming.work_log import WorkLog
from proofs.witness.catalogue import CatalogueReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proofs.demo.streaming.work_log import Done, InHand
    from proofs.witness.catalogue import Event
    from proofs.witness.group_log import GroupLog

RATE_OVER_S = 3.0
_DAGSTER_EVERY_S = 0.5
_PROCESS = re.compile(r"Executing steps in process \(pid: (\d+)\)")
_SHORT_ID = 8


class Life(enum.Enum):
    """The states of a streaming run."""

    STARTING = "starting"
    WORKING = "at work"
    LEFT = "has left"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class StreamingRun:
    """A streaming run.

    Attributes:
        number: Its number in the display.
        run_id: Dagster's id.
        code: Number of its version of the code.
        life: Its state.
        status: Dagster's status.
    """

    number: int
    run_id: str
    code: str
    life: Life
    status: dg.DagsterRunStatus

    @property
    def name(self) -> str:
        return f"run {self.number}"


@dataclass(frozen=True, slots=True)
class Lane:
    """One partition.

    Attributes:
        number: Its number.
        owner: Its owner, or None.
        is_asked_back: Whether the owner has to give it up.
        committed: The committed offset.
        lag: Number of uncommitted records.
        per_second: Records committed per second.
        last: The last commit.
        in_hand: The claimed range.
    """

    number: int
    owner: StreamingRun | None
    is_asked_back: bool
    committed: int
    lag: int
    per_second: float
    last: Done | None
    in_hand: InHand | None

    @property
    def name(self) -> str:
        return f"{TOPIC}-{self.number}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of all partitions at one time."""

    lanes: tuple[Lane, ...]
    runs: tuple[StreamingRun, ...]

    @property
    def lag(self) -> int:
        return sum(lane.lag for lane in self.lanes)

    @property
    def owners(self) -> set[int]:
        """The numbers of the runs with partitions; 0 for a partition without an owner."""
        return {lane.owner.number if lane.owner else 0 for lane in self.lanes}

    @property
    def committed(self) -> dict[int, int]:
        """The committed offset of each partition."""
        return {lane.number: lane.committed for lane in self.lanes}

    def committed_since(self, at: float) -> bool:
        """Return whether each partition has had a commit since."""
        return all(lane.last is not None and lane.last.at > at for lane in self.lanes)


@dataclass
class Watcher:
    """Follows the group and its runs.

    Attributes:
        instance: The Dagster instance.
        log: The group's records in Kafka.
        work: The history of the partitions.
        killed: Ids of the runs that the play has killed.
    """

    instance: dg.DagsterInstance
    log: GroupLog
    work: WorkLog = field(default_factory=WorkLog)
    killed: set[str] = field(default_factory=set)
    catalogue: CatalogueReader = field(init=False)
    _members: dict[str, str] = field(default_factory=dict)
    _has_worked: set[str] = field(default_factory=set)
    _runs: tuple[StreamingRun, ...] = ()
    _events: list[Event] = field(default_factory=list)
    _asked_dagster_at: float = float("-inf")

    def __post_init__(self) -> None:
        self.catalogue = CatalogueReader(self.instance, GROUP)

    def look_at_kafka(self) -> None:
        """Read new records from Kafka alone, which is fast."""
        for record in self.log.new():
            self.work.take(record)

    def look(self, ends: Sequence[int]) -> Snapshot:
        """Read new records and return the state; `ends` are the ends of the partitions."""
        self.look_at_kafka()
        if time.monotonic() - self._asked_dagster_at >= _DAGSTER_EVERY_S:
            self._asked_dagster_at = time.monotonic()
            self._ask_dagster()
        since = time.time() - RATE_OVER_S
        recent = [0] * PARTITIONS
        for done in reversed(self.work.done):
            if done.at < since:
                break
            recent[done.range.partition] += len(done.range)
        lanes = [
            Lane(
                number=number,
                owner=self._owner(number),
                is_asked_back=self.work.owners.is_asked_back(number),
                committed=self.work.committed(number),
                # The commit may be visible before the producer has the confirmation of its records.
                lag=max(0, ends[number] - self.work.committed(number)),
                per_second=recent[number] / RATE_OVER_S,
                last=self.work.last(number),
                in_hand=self.work.in_hand.get(number),
            )
            for number in range(PARTITIONS)
        ]
        return Snapshot(tuple(lanes), self._runs)

    def recorded_until(self) -> dict[int, int]:
        """Return the end of Dagster's recorded commits of each partition."""
        reached = dict.fromkeys(range(PARTITIONS), 0)
        for one in self.catalogue.recorded:
            reached[one.range.partition] = max(reached[one.range.partition], one.range.until)
        return reached

    def take_events(self) -> list[Event]:
        """Return the catalogue's events since the last call."""
        new, self._events = self._events, []
        return new

    def named(self, run_id: str) -> StreamingRun | None:
        """Return a run by its id or a prefix of it."""
        return next((run for run in self._runs if run.run_id.startswith(run_id)), None)

    def process_of(self, run: StreamingRun) -> int | None:
        """Return the pid of a run from its log."""
        for entry in self.instance.all_logs(run.run_id):
            if found := _PROCESS.search(entry.message):
                return int(found[1])
        return None

    def _ask_dagster(self) -> None:
        for event in self.catalogue.read():
            self._events.append(event)
            run_id = run_of(event)
            if event.kind == "assigned":
                self._members[str(event.metadata.get("member_id"))] = run_id
                self._has_worked.add(run_id)
        records = self.instance.get_run_records(dg.RunsFilter(job_name=JOB), ascending=True)
        versions = list(dict.fromkeys(one.dagster_run.tags[VERSION_TAG] for one in records))
        self._runs = tuple(
            StreamingRun(
                number,
                run.run_id,
                f"v{versions.index(run.tags[VERSION_TAG]) + 1}",
                self._life(run),
                run.status,
            )
            for number, run in enumerate((one.dagster_run for one in records), start=1)
        )

    def _life(self, run: dg.DagsterRun) -> Life:
        if run.run_id in self.killed:
            return Life.KILLED
        if run.is_finished:
            return Life.LEFT
        return Life.WORKING if run.run_id[:_SHORT_ID] in self._has_worked else Life.STARTING

    def _owner(self, number: int) -> StreamingRun | None:
        member = self.work.owners.of(number)
        run_id = self._members.get(member or "")
        return self.named(run_id) if run_id else None


def run_of(event: Event) -> str:
    """Return the prefix of the run id of an event."""
    return event.member.rpartition("/")[2]
