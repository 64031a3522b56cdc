"""Reruns in both forms of runs at once, with Kafka and Dagster.

One story, as the start takes longest: process records, change the code, and process a part again
while new records arrive.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import dagster as dg
import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import TopicPartition as Partition
from confluent_kafka.admin import AdminClient

from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import (
    RERUN_BY_TAG,
    RERUN_REASON_TAG,
    RERUN_TAG,
)
from dagster_rebalance.testing.deadline import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.deployment import DagsterDeployment

pytestmark = [pytest.mark.e2e, pytest.mark.broker]
PARTITIONS, RECORDS, ROUNDS = 2, 10, 3
BATCHES, STREAM = "again_batches", "again_stream"
GROUPS = (BATCHES, STREAM)


class Ground:
    """Kafka and Dagster with both groups."""

    def __init__(
        self,
        kafka: KafkaCluster,
        dagster: DagsterDeployment,
        root: Path,
        instance: dg.DagsterInstance,
    ) -> None:
        self.kafka = kafka
        self.dagster = dagster
        self.root = root
        self.produced = 0
        self.instance = instance

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        """Wait for something, with patience."""
        wait_until(
            lambda: condition() or None,
            timeout_s=240,
            what=lambda: f"{what}; {self.state()}",
            interval_s=0.5,
        )

    def state(self) -> str:
        """Return the state for error messages."""
        runs = [
            (run.job_name, run.run_id[:8], run.status.value) for run in self.instance.get_runs()
        ]
        ticks = {
            group: [
                tick["skipReason"] or tick["error"]
                for tick in self.dagster.ui.ticks("shop", f"{group}_sensor")[:2]
            ]
            for group in GROUPS
        }
        return f"runs {runs}, ticks {ticks}"

    def produce(self) -> None:
        """Write distinct records to each partition of each group."""
        # Members see all of these records at once.
        producer = Producer({**self.kafka.client_config(), "linger.ms": 1_000})
        for group in GROUPS:
            for partition in range(PARTITIONS):
                for number in range(RECORDS):
                    value = f"{partition}:{self.produced + number}".encode()
                    producer.produce(group, value, partition=partition)
        producer.flush(120)
        self.produced += RECORDS

    def committed(self, group: str) -> set[int]:
        """The committed offsets of all partitions."""
        consumer = Consumer({**self.kafka.client_config(), "group.id": group})
        wanted = [Partition(group, number) for number in range(PARTITIONS)]
        try:
            return {found.offset for found in consumer.committed(wanted, timeout=120)}
        except KafkaException:  # the coordinator of a new group has to be found first
            return set()
        finally:
            consumer.close()

    def is_done(self) -> bool:
        """Whether both groups have committed and recorded all that there is."""
        recorded = {
            group: sum(until - start for _, start, until in self.recorded(group))
            for group in GROUPS
        }
        return all(
            self.committed(group) == {self.produced}
            and recorded[group] == self.produced * PARTITIONS
            for group in GROUPS
        )

    def recorded(self, group: str) -> list[tuple[str, int, int]]:
        """All commits that are recorded, several that are joined as one."""
        key = GroupAssets.of(group).offsets
        records = self.instance.fetch_materializations(key, limit=1000).records
        found = []
        for record in records:
            event = record.asset_materialization
            assert event is not None
            start, until = event.metadata["start"].value, event.metadata["until"].value
            assert isinstance(start, int)
            assert isinstance(until, int)
            found.append((str(event.partition), start, until))
        return found

    def output(self, group: str) -> dict[str, list[str]]:
        """The lines of each file."""
        return {path.name: path.read_text().split("\n") for path in (self.root / group).iterdir()}

    def check_output(self, group: str) -> None:
        """Check that each record is there once."""
        records = Counter(record for lines in self.output(group).values() for record in lines[1:])
        assert records == {
            f"{partition}:{number}": 1
            for partition in range(PARTITIONS)
            for number in range(self.produced)
        }

    def typed(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command."""
        command = [sys.executable, "-m", "dagster_rebalance.cli", *arguments]
        env = {**os.environ, "DAGSTER_HOME": str(self.dagster.home), "COLUMNS": "200"}
        return subprocess.run(command, env=env, check=False, capture_output=True, text=True)

    def reruns(self, group: str) -> list[dg.DagsterRun]:
        """The runs of reruns of a group."""
        runs = self.instance.get_runs(dg.RunsFilter(job_name=group))
        return [run for run in runs if RERUN_TAG in run.tags]

    def observed(self, key: dg.AssetKey, event: str) -> list[dg.AssetObservation]:
        """Return the observations of an asset."""
        records = self.instance.fetch_observations(key, limit=1000).records
        events = [record.asset_observation for record in records]
        return [e for e in events if e is not None and e.metadata["event"].value == event]


def test_rerun_processes_past_ranges_while_the_group_continues(
    kafka_broker: KafkaCluster, dagster: DagsterDeployment, root: Path
) -> None:
    folder = root / "reruns"
    for group in GROUPS:
        (folder / group).mkdir()
        kafka_broker.create_topic(group, PARTITIONS)
    with dagster.instance() as instance:
        ground = Ground(kafka_broker, dagster, folder, instance)
        for group in GROUPS:
            dagster.ui.start_sensor("shop", f"{group}_sensor")
        for _ in range(ROUNDS):
            ground.produce()
            ground.wait("both groups to be at the end", ground.is_done)
        (folder / "version").write_text("v2")
        dagster.ui.reload("shop")
        before = {group: ground.output(group) for group in GROUPS}

        (folder / "closed").touch()
        asked = _ask_in_a_terminal(ground)
        _ask_on_a_page(ground)
        ground.wait(
            "a run of each rerun to work",
            lambda: all(
                [run.status for run in ground.reruns(group)] == [dg.DagsterRunStatus.STARTED]
                for group in GROUPS
            ),
        )
        second = ground.typed(*asked, "--yes")
        assert second.returncode == 1
        assert "already includes" in second.stderr

        ground.produce()
        ground.wait("the groups to go on beside the reruns", ground.is_done)
        assert {group: [r.is_finished for r in ground.reruns(group)] for group in GROUPS} == {
            group: [False] for group in GROUPS
        }
        (folder / "closed").unlink()
        ground.wait(
            "the reruns to be done",
            lambda: all(
                ground.observed(GroupAssets.of(group).group, "rerun_done") for group in GROUPS
            ),
        )

        for group in GROUPS:
            _check(ground, group, before[group])
        _check_that_a_hole_is_refused(ground)


def _ask_in_a_terminal(ground: Ground) -> tuple[str, ...]:
    """Request a part of one range, which repeats the whole range."""
    meant = ("rerun", f"{BATCHES}:0", "--from-offset", "15", "--until-offset", "99")
    asked = (*meant, "--group", BATCHES, "-r", "the fix", "--by", "ada")
    shown = ground.typed(*asked)
    assert shown.returncode == 0, shown.stderr
    assert "the whole range; a part was requested" in shown.stdout
    assert f"left out: {BATCHES}-0 [30, 99): not committed yet" in shown.stdout
    assert "Nothing was started" in shown.stdout
    assert not ground.reruns(BATCHES)
    begun = ground.typed(*asked, "--yes")
    assert begun.returncode == 0, begun.stderr
    assert "by ada: the fix: 1 run, at most 2 at once" in begun.stdout
    return asked


def _ask_on_a_page(ground: Ground) -> None:
    """All of the stream, by the time of its commits."""
    job = f"{STREAM}_rerun"
    config = {"partitions": ["*"], "since": "2020-01-01", "reason": "the fix", "by": "bob"}
    run_config = {"ops": {f"{job}_request": {"config": {**config, "dry_run": False}}}}
    run_id = ground.dagster.ui.launch("shop", job, run_config)
    run = ground.dagster.wait_for_run(run_id, timeout_s=240)
    assert run.status is dg.DagsterRunStatus.SUCCESS


def _check(ground: Ground, group: str, before: dict[str, list[str]]) -> None:
    after = ground.output(group)
    (run,) = ground.reruns(group)
    assert run.status is dg.DagsterRunStatus.SUCCESS
    who = {BATCHES: "ada", STREAM: "bob"}[group]
    assert (run.tags[RERUN_BY_TAG], run.tags[RERUN_REASON_TAG]) == (who, "the fix")
    ends = {name: int(name.rpartition("-")[2]) for name in before}
    meant = {
        name for name in before if group == STREAM or (f"{group}-0-" in name and ends[name] > 15)
    }
    assert meant
    assert {name for name in before if after[name][0] == "v2"} == meant
    assert {name: lines[1:] for name, lines in after.items() if name in before} == {
        name: lines[1:] for name, lines in before.items()
    }
    ground.check_output(group)
    assert ground.is_done(), "a rerun commits nothing, and records no commit"
    assert len(set(ground.recorded(group))) == len(ground.recorded(group))
    shown = ground.observed(GroupAssets.of(group).offsets, "reprocessed")
    assert {str(event.partition) for event in shown} == {name.rsplit("-", 2)[0] for name in meant}
    assert {event.metadata["run"].value for event in shown} == {run.run_id}


def _check_that_a_hole_is_refused(ground: Ground) -> None:
    """Kafka's retention has deleted some of the records."""
    admin = AdminClient({**ground.kafka.client_config()})
    for future in admin.delete_records([Partition(BATCHES, 1, 5)]).values():
        future.result(120)
    asked = ("rerun", f"{BATCHES}:1", "--from-offset", "0", "--group", BATCHES, "-r", "more")
    refused = ground.typed(*asked, "--yes")
    assert refused.returncode == 1
    assert f"Kafka has deleted records of {BATCHES}-1 [0, " in refused.stderr
    assert len(ground.reruns(BATCHES)) == 1
