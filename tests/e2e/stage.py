"""A real Kafka and a real Dagster with two code locations for the end-to-end tests.

Tests that depend on the protocol run with both at the same time; the others use one of them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as Partition

from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.deployment import CodeLocation, DagsterDeployment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dagster_rebalance.testing.broker import KafkaCluster

PROJECT = Path(__file__).parent / "project"
PROTOCOLS = ("consumer", "classic")
PATIENCE_S = 240.0
SETTINGS = {
    "sensors": {"use_threads": True, "num_workers": 4},
    "run_coordinator": {
        "module": "dagster.core.run_coordinator",
        "class": "QueuedRunCoordinator",
        "config": {
            "max_concurrent_runs": 30,
            "dequeue_interval_seconds": 1,
            "dequeue_use_threads": True,
            "dequeue_num_workers": 4,
            "tag_concurrency_limits": [
                {"key": "e2e/queue", "value": f"{scenario}_{protocol}", "limit": limit}
                for protocol in PROTOCOLS
                for scenario, limit in (("queued", 1), ("ended", 3), ("handled", 1))
            ],
        },
    },
}


@dataclass
class Stage:
    """Kafka and Dagster, and the folder through which tests steer the runs."""

    kafka: KafkaCluster
    dagster: DagsterDeployment
    root: Path
    instance: dg.DagsterInstance
    turned_on: list[tuple[str, str]] = field(default_factory=list)

    def turn_off(self) -> None:
        """Turn all sensors off, so their members leave and do not slow down the next test."""
        while self.turned_on:
            self.dagster.ui.stop_sensor(*self.turned_on.pop())

    def group(
        self, scenario: str, protocol: str, *, partitions: int = 2, records: int = 10
    ) -> Group:
        """Make a topic with records in it, and the group that reads it; its gate is closed."""
        group = Group(self, f"{scenario}_{protocol}")
        for name in ("working", "failures", "output", "at_work", "company"):
            (group.folder / name).mkdir(parents=True)
        group.close()
        self.kafka.create_topic(group.name, partitions)
        group.produce(range(partitions), records)
        return group

    def dead_letters(self) -> dict[str, dict[str, Any]]:
        """The records of the topic `dead_letters`, by key."""
        consumer = Consumer({**self.kafka.client_config(), "group.id": "letters"})
        try:
            consumer.assign([Partition("dead_letters", 0, 0)])
            _, until = consumer.get_watermark_offsets(Partition("dead_letters", 0), 30)
            found = consumer.consume(until, 30)
            return {
                (record.key() or b"").decode(): json.loads(record.value() or b"{}")
                for record in found
            }
        finally:
            consumer.close()

    def groups(self, scenario: str, *, partitions: int = 2, records: int = 10) -> list[Group]:
        """The same in both protocols."""
        return [
            self.group(scenario, protocol, partitions=partitions, records=records)
            for protocol in PROTOCOLS
        ]


@dataclass
class Group:
    """A consumer group of a scenario: its topic, its sensor and its runs."""

    stage: Stage
    name: str

    @property
    def protocol(self) -> str:
        """The group protocol."""
        return self.name.rpartition("_")[2]

    @property
    def folder(self) -> Path:
        """Where the runs of the group look for orders and leave their output."""
        return self.stage.root / self.name

    @property
    def sensor(self) -> str:
        """The name of its sensor."""
        return f"{self.name}_sensor"

    def close(self) -> None:
        """Let runs wait before they do anything."""
        (self.folder / "closed").touch()

    def open(self) -> None:
        """Let runs go on."""
        (self.folder / "closed").unlink()

    def fail_next(self, times: int) -> None:
        """Let the next runs fail."""
        for number in range(times):
            (self.folder / "failures" / str(number)).touch()

    def produce(self, partitions: Iterable[int], records: int) -> None:
        """Write records to each of the partitions."""
        # Members see all of these records at once.
        producer = Producer({**self.stage.kafka.client_config(), "linger.ms": 1_000})
        for partition in partitions:
            for number in range(records):
                producer.produce(self.name, f"{partition}:{number}".encode(), partition=partition)
        producer.flush(120)

    def turn_on(self, location: str) -> None:
        """Let a code location take part."""
        self.stage.dagster.ui.start_sensor(location, self.sensor)
        self.stage.turned_on.append((location, self.sensor))

    def ticks(self, location: str) -> list[dict[str, Any]]:
        """The last ticks, newest first."""
        return self.stage.dagster.ui.ticks(location, self.sensor)

    def wait(
        self,
        what: str,
        condition: Callable[[Group], object],
        timeout_s: float = PATIENCE_S,
        interval_s: float = 0.5,
    ) -> None:
        """Wait for a condition; the error includes the state."""
        wait_until(
            lambda: condition(self) or None,
            timeout_s=timeout_s,
            what=lambda: f"{self.name}: {what}; {self.state()}",
            interval_s=interval_s,
        )

    def state(self) -> str:
        """Return the state for error messages."""
        ticks = {
            location: [tick["skipReason"] or tick["error"] for tick in self.ticks(location)[:2]]
            for location, sensor in self.stage.turned_on
            if sensor == self.sensor
        }
        runs = [f"{run.run_id[:8]} {run.status.value}" for run in self.runs()]
        return (
            f"runs {runs}, ticks {ticks}, working {self.working()}, committed {self.committed()}, "
            f"events {self.events()}"
        )

    def runs(self) -> list[dg.DagsterRun]:
        """All runs of the group, oldest first."""
        records = self.stage.instance.get_run_records(
            dg.RunsFilter(job_name=self.name), ascending=True
        )
        return [record.dagster_run for record in records]

    def in_state(self, *states: dg.DagsterRunStatus) -> list[str]:
        """The runs that Dagster shows in one of the states, oldest first."""
        return [run.run_id for run in self.runs() if run.status in states]

    def processes(self) -> dict[str, int]:
        """The processes that have begun to work and exist, by run."""
        found = {path.name: path.read_text() for path in (self.folder / "working").iterdir()}
        return {
            run_id: int(pid) for run_id, pid in found.items() if pid and Path("/proc", pid).exists()
        }

    def working(self) -> list[str]:
        """The runs that have begun to work, ended ones included."""
        return [path.name for path in (self.folder / "working").iterdir()]

    def output(self, asset: str = "work") -> Counter[str]:
        """How often each range was written by an asset."""
        files = (self.folder / "output").glob(f"{asset}.*")
        return Counter(
            {
                path.name.removeprefix(f"{asset}."): len(path.read_text().splitlines())
                for path in files
            }
        )

    def committed(self) -> dict[int, int]:
        """The committed offsets by partition; 0 where there is none."""
        consumer = Consumer({**self.stage.kafka.client_config(), "group.id": self.name})
        try:
            count = len(self.stage.kafka.leaders(self.name))
            return {
                found.partition: max(0, found.offset)
                for found in consumer.committed([Partition(self.name, p) for p in range(count)], 30)
            }
        finally:
            consumer.close()

    def materialised(self) -> list[tuple[str, int, int]]:
        """Return partition, start and until of every recorded commit, without users' reports."""
        key = GroupAssets.of(self.name).offsets
        records = self.stage.instance.fetch_materializations(
            dg.AssetRecordsFilter(key), limit=1000, ascending=True
        ).records
        events = [record.asset_materialization for record in records]
        return [
            (str(e.partition), _number(e, "start"), _number(e, "until"))
            for e in events
            if e is not None and "until" in e.metadata
        ]

    def committers(self) -> set[str]:
        """The code locations whose members committed something."""
        records = self.stage.instance.fetch_materializations(
            dg.AssetRecordsFilter(GroupAssets.of(self.name).offsets), limit=1000
        ).records
        return {
            str(r.asset_materialization.metadata["member"].value)
            for r in records
            if r.asset_materialization is not None
        }

    def events(self, kind: str | None = None, location: str | None = None) -> list[dict[str, Any]]:
        """Return the observations of the group (joined, hold, left), oldest first."""
        key = GroupAssets.of(self.name).group
        records = self.stage.instance.fetch_observations(
            dg.AssetRecordsFilter(key), limit=1000, ascending=True
        ).records
        found = [
            {k: v.value for k, v in r.asset_observation.metadata.items()}
            for r in records
            if r.asset_observation is not None
        ]
        return [
            e
            for e in found
            if kind in {None, e["event"]} and location in {None, e["code_location"]}
        ]

    def holds(self, location: str) -> list[dict[str, Any]]:
        """The receipts of a code location's holds, oldest first."""
        return self.events("hold", location)

    def is_done(self, records: int = 10) -> bool:
        """Whether every partition is committed up to `records`, and that is recorded."""
        recorded = {partition for partition, _, until in self.materialised() if until == records}
        return len(recorded) == len(self.stage.kafka.leaders(self.name)) and set(
            self.committed().values()
        ) == {records}

    def check_exactly_once(self, *assets: str) -> None:
        """Check that each asset wrote, and Dagster recorded, each committed offset once."""
        company = [path.read_text() for path in (self.folder / "company").iterdir()]
        assert not company, f"a run began beside a process at work on the same range: {company}"
        for asset in assets or ("work",):
            written = self.output(asset)
            assert set(written.values()) <= {1}, f"written more than once: {written}"
            covered: Counter[int] = Counter()
            for key in written:
                _, partition, start, until = key.rsplit("-", 3)
                covered[int(partition)] += int(until) - int(start)
            assert dict(covered) == {
                partition: offset for partition, offset in self.committed().items() if offset
            }
        recorded = self.materialised()
        assert len(set(recorded)) == len(recorded), f"recorded more than once: {recorded}"
        offsets: Counter[str] = Counter()
        for name, first, behind in recorded:
            assert offsets[name] == first, f"commits of {name} do not follow each other: {recorded}"
            offsets[name] = behind
        assert {int(name.rpartition("-")[2]): offset for name, offset in offsets.items()} == {
            partition: offset for partition, offset in self.committed().items() if offset
        }


def _number(event: dg.AssetMaterialization, name: str) -> int:
    value = event.metadata[name].value
    assert isinstance(value, int)
    return value


def in_both_protocols(*scenarios: str) -> tuple[str, ...]:
    """The names of the groups that play these scenarios."""
    return tuple(f"{scenario}_{protocol}" for scenario in scenarios for protocol in PROTOCOLS)


def locations(
    groups: Iterable[str],
    root: Path,
    bootstrap_servers: str,
    *names: str,
    reloads: bool = False,
    secrets: Mapping[str, str] | None = None,
) -> list[CodeLocation]:
    """Return code locations with the same groups; `secrets` are variables for a secured Kafka."""
    env = {
        "E2E_ROOT": str(root),
        "E2E_GROUPS": ",".join(groups),
        "KAFKA_BROKERS": bootstrap_servers,
        **(secrets or {}),
    }
    return [CodeLocation(name, "e2e_project", PROJECT, env, reloads=reloads) for name in names]


def partitions_of(hold: dict[str, Any]) -> set[str]:
    """The partitions that a receipt names."""
    value = hold["partitions"]
    return set(json.loads(value) if isinstance(value, str) else value)
