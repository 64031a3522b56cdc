"""How things stand during the demo: who owns each partition, what is committed, and which runs are at work.

Reads Dagster's catalogue, as a person would, and asks Kafka who it gave what to. Decides nothing and changes nothing.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import dagster as dg
from confluent_kafka import KafkaException

from dagster_rebalance.cli.demo.checks import HoldSeen
from dagster_rebalance.core.partition import OffsetRange
from dagster_rebalance.orchestration.catalogue import GroupAssets
from dagster_rebalance.orchestration.tags import BATCH_TAG, GROUP_TAG, ranges_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from confluent_kafka.admin import AdminClient

    from dagster_rebalance.cli.interrupts import Interrupts

_PAGE = 200
_LIMIT_S = 15.0
_QUEUED = [dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED]
_LIVE = [*_QUEUED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]


@dataclass(frozen=True, slots=True)
class RunAtWork:
    """A run that is not over.

    Attributes:
        run_id: Its id.
        partitions: What it works on.
        is_queued: Whether Dagster has not begun to start it.
        seconds: For how long its process has worked; 0 before it began.
    """

    run_id: str
    partitions: frozenset[str]
    is_queued: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """A commit as Dagster shows it."""

    member: str
    range: OffsetRange


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the catalogue says of the group: who joined, was assigned what, held or left."""

    kind: str
    member: str
    text: str
    partitions: tuple[str, ...]
    metadata: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Lane:
    """One partition.

    Attributes:
        name: The partition.
        owner: The code location whose member has it; empty while it has none.
        is_draining: Whether Kafka or a shutdown wants it back from the owner.
        committed: The last recorded offset.
        end: Where it ends.
        run: The run that works on it.
    """

    name: str
    owner: str
    is_draining: bool
    committed: int
    end: int
    run: RunAtWork | None

    @property
    def lag(self) -> int:
        """How many records are not committed yet."""
        return self.end - self.committed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it at one time."""

    lanes: tuple[Lane, ...]
    runs: tuple[RunAtWork, ...]

    def owned_by(self, member: str) -> list[Lane]:
        """The partitions of a member."""
        return [lane for lane in self.lanes if lane.owner == member]

    @property
    def lag(self) -> int:
        """How many records are not committed yet."""
        return sum(lane.lag for lane in self.lanes)


@dataclass
class Watcher:
    """Follows one group.

    Attributes:
        instance: Where the catalogue is.
        group: The consumer group.
        names: Its partitions.
        admin: For Kafka.
        interrupts: librdkafka aborts the process when the broker goes during a description of a group: a signal must wait for its end.
        events: What has been seen, oldest first.
        recorded: The commits that have been seen, oldest first.
        leaving: Members that have been told to shut down.
    """

    instance: dg.DagsterInstance
    group: str
    names: Sequence[str]
    admin: AdminClient
    interrupts: Interrupts
    events: list[Event] = field(default_factory=list)
    recorded: list[Recorded] = field(default_factory=list)
    leaving: set[str] = field(default_factory=set)
    _owners: dict[str, str] = field(default_factory=dict)
    _kafka_ids: dict[str, str] = field(default_factory=dict)
    _newest_observation: int | None = None
    _newest_materialisation: int | None = None

    def look(self, ends: Sequence[int]) -> Snapshot:
        """See what is new. `ends` are the ends of the partitions."""
        self._read_events()
        self._read_commits()
        runs = tuple(self._runs())
        assigned = self._assigned()
        committed = {str(one.range.topic_partition): one.range.until for one in self.recorded}
        lanes = [
            Lane(
                name=name,
                owner=(owner := self._owners.get(name, "")),
                is_draining=bool(owner) and (owner in self.leaving or name not in assigned.get(owner, {name})),
                committed=committed.get(name, 0),
                end=end,
                run=next((run for run in runs if name in run.partitions), None),
            )
            for name, end in zip(self.names, ends, strict=True)
        ]
        return Snapshot(tuple(lanes), runs)

    @property
    def holds(self) -> list[HoldSeen]:
        """The receipts so far, oldest first."""
        return [_hold(event) for event in self.events if event.kind == "hold"]

    def _read_events(self) -> None:
        key = GroupAssets.of(self.group).group
        while True:
            found = self.instance.fetch_observations(
                dg.AssetRecordsFilter(key, after_storage_id=self._newest_observation), limit=_PAGE, ascending=True
            ).records
            for record in found:
                self._newest_observation = record.storage_id
                if record.asset_observation is not None:
                    self._take(_event(record.asset_observation))
            if len(found) < _PAGE:
                return

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if event.kind == "assigned":
            self._owners.update(dict.fromkeys(event.partitions, event.member))
            self._kafka_ids[str(event.metadata.get("member_id"))] = event.member
        elif event.kind in {"hold", "left"}:
            gone = [
                name for name, owner in self._owners.items() if owner == event.member and (name in event.partitions or event.kind == "left")
            ]
            for name in gone:
                del self._owners[name]

    def _read_commits(self) -> None:
        key = GroupAssets.of(self.group).offsets
        while True:
            found = self.instance.fetch_materializations(
                dg.AssetRecordsFilter(key, after_storage_id=self._newest_materialisation), limit=_PAGE, ascending=True
            ).records
            for record in found:
                self._newest_materialisation = record.storage_id
                if record.asset_materialization is not None:
                    self.recorded.append(_recorded(record.asset_materialization))
            if len(found) < _PAGE:
                return

    def _runs(self) -> Iterator[RunAtWork]:
        now = time.time()
        for record in self.instance.get_run_records(dg.RunsFilter(tags={GROUP_TAG: self.group}, statuses=_LIVE)):
            run = record.dagster_run
            ranges = ranges_in(run.run_config, run.tags.get(BATCH_TAG, ""))
            yield RunAtWork(
                run_id=run.run_id,
                partitions=frozenset(str(one.topic_partition) for one in ranges),
                is_queued=run.status in _QUEUED,
                seconds=now - record.start_time if record.start_time else 0.0,
            )

    def _assigned(self) -> dict[str, set[str]]:
        """What Kafka lets each member have. During a hold that is less than the member has."""
        with self.interrupts.deferred():
            try:
                described = self.admin.describe_consumer_groups([self.group], request_timeout=_LIMIT_S)[self.group].result(_LIMIT_S)
            except KafkaException:  # before the first member there is no group
                return {}
        return {
            self._kafka_ids[member.member_id]: {f"{one.topic}-{one.partition}" for one in member.assignment.topic_partitions}
            for member in described.members
            if member.member_id in self._kafka_ids
        }


def _event(observation: dg.AssetObservation) -> Event:
    said = {name: value.value for name, value in observation.metadata.items()}
    return Event(
        kind=str(said["event"]),
        member=str(said["code_location"]),
        text=observation.description or "",
        partitions=tuple(_list(said.get("partitions"))),
        metadata=said,
    )


def _hold(event: Event) -> HoldSeen:
    said = event.metadata
    return HoldSeen(
        member=event.member,
        outcome=str(said["outcome"]),
        cause=str(said["cause"]),
        partitions=event.partitions,
        seconds=float(str(said["seconds"])),
        ended_at=float(str(said["ended_at"])),
        runs=len(_list(said.get("runs"))),
    )


def _recorded(materialisation: dg.AssetMaterialization) -> Recorded:
    said = {name: value.value for name, value in materialisation.metadata.items()}
    topic, _, partition = (materialisation.partition or "").rpartition("-")
    return Recorded(str(said.get("member")), OffsetRange(topic, int(partition), int(str(said["start"])), int(str(said["until"]))))


def _list(value: object) -> list[str]:
    items = json.loads(value) if isinstance(value, str) else value
    return [str(item) for item in items] if isinstance(items, list) else []
