"""The state of the story from Dagster's catalogue and Kafka: owners, committed offsets, runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import dagster as dg
from confluent_kafka import KafkaException

from dagster_rebalance.orchestration.storage.run_tags import BATCH_TAG, GROUP_TAG, ranges_in
from proofs.witness.catalogue import CatalogueReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from confluent_kafka.admin import AdminClient

    from proofs.interrupts import Interrupts
    from proofs.witness.catalogue import Event, HoldSeen, Recorded

_LIMIT_S = 15.0
_QUEUED = [dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED]
_LIVE = [
    *_QUEUED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


@dataclass(frozen=True, slots=True)
class RunAtWork:
    """An unfinished run.

    Attributes:
        run_id: Its id.
        partitions: Its partitions.
        is_queued: Whether it is in Dagster's queue.
        seconds: Time since its process began to work, or 0.
    """

    run_id: str
    partitions: frozenset[str]
    is_queued: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Lane:
    """The state of one partition.

    Attributes:
        name: The partition.
        owner: Code location of the owner, or empty.
        is_draining: Whether the owner has to give it up.
        committed: The last recorded offset.
        end: The end of the partition.
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
        return self.end - self.committed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of all partitions at one time."""

    lanes: tuple[Lane, ...]
    runs: tuple[RunAtWork, ...]

    def owned_by(self, member: str) -> list[Lane]:
        return [lane for lane in self.lanes if lane.owner == member]

    @property
    def lag(self) -> int:
        return sum(lane.lag for lane in self.lanes)


@dataclass
class Watcher:
    """Follows one group.

    Attributes:
        instance: The Dagster instance.
        group: The consumer group.
        names: Its partitions.
        admin: The Kafka client.
        interrupts: Defers signals during the description of a group: librdkafka aborts the process
            if the broker becomes unavailable.
        leaving: Members that are being shut down.
    """

    instance: dg.DagsterInstance
    group: str
    names: Sequence[str]
    admin: AdminClient
    interrupts: Interrupts
    leaving: set[str] = field(default_factory=set)
    _owners: dict[str, str] = field(default_factory=dict)
    _kafka_ids: dict[str, str] = field(default_factory=dict)
    _catalogue: CatalogueReader = field(init=False)

    def __post_init__(self) -> None:
        self._catalogue = CatalogueReader(self.instance, self.group)

    @property
    def events(self) -> list[Event]:
        return self._catalogue.events

    @property
    def recorded(self) -> list[Recorded]:
        return self._catalogue.recorded

    def look(self, ends: Sequence[int]) -> Snapshot:
        """Read the new events and return the state; `ends` are the ends of the partitions."""
        for event in self._catalogue.read():
            self._take(event)
        runs = tuple(self._runs())
        assigned = self._assigned()
        committed = {str(one.range.topic_partition): one.range.until for one in self.recorded}
        lanes = [
            Lane(
                name=name,
                owner=(owner := self._owners.get(name, "")),
                is_draining=bool(owner)
                and (owner in self.leaving or name not in assigned.get(owner, {name})),
                committed=committed.get(name, 0),
                end=end,
                run=next((run for run in runs if name in run.partitions), None),
            )
            for name, end in zip(self.names, ends, strict=True)
        ]
        return Snapshot(tuple(lanes), runs)

    @property
    def holds(self) -> list[HoldSeen]:
        return self._catalogue.holds

    def _take(self, event: Event) -> None:
        if event.kind == "assigned":
            self._owners.update(dict.fromkeys(event.partitions, event.member))
            self._kafka_ids[str(event.metadata.get("member_id"))] = event.member
        elif event.kind in {"hold", "left"}:
            gone = [
                name
                for name, owner in self._owners.items()
                if owner == event.member and (name in event.partitions or event.kind == "left")
            ]
            for name in gone:
                del self._owners[name]

    def _runs(self) -> Iterator[RunAtWork]:
        now = time.time()
        for record in self.instance.get_run_records(
            dg.RunsFilter(tags={GROUP_TAG: self.group}, statuses=_LIVE)
        ):
            run = record.dagster_run
            ranges = ranges_in(run.run_config, run.tags.get(BATCH_TAG, ""))
            yield RunAtWork(
                run_id=run.run_id,
                partitions=frozenset(str(one.topic_partition) for one in ranges),
                is_queued=run.status in _QUEUED,
                seconds=now - record.start_time if record.start_time else 0.0,
            )

    def _assigned(self) -> dict[str, set[str]]:
        """Return each member's assignment in Kafka, which excludes held partitions."""
        with self.interrupts.deferred():
            try:
                described = self.admin.describe_consumer_groups(
                    [self.group], request_timeout=_LIMIT_S
                )[self.group].result(_LIMIT_S)
            except KafkaException:  # before the first member there is no group
                return {}
        return {
            self._kafka_ids[member.member_id]: {
                f"{one.topic}-{one.partition}" for one in member.assignment.topic_partitions
            }
            for member in described.members
            if member.member_id in self._kafka_ids
        }
