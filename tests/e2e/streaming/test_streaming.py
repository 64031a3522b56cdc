"""Streaming runs with a real Kafka and a real Dagster.

Each test is a story, because the start of runs takes longest. In the first one, with both
protocols, two runs share the partitions, a partition is paused, a deploy replaces the runs, and one
is killed. In the second one a launcher that behaves like a cluster starts the runs; one is killed,
the others are cancelled.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import TopicPartition as Partition

from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import VERSION_TAG
from dagster_rebalance.testing.deadline import wait_until
from tests.e2e.streaming.conftest import DETACHED

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.deployment import DagsterDeployment

pytestmark = [pytest.mark.e2e, pytest.mark.broker]
PARTITIONS, RECORDS = 4, 5
STREAMS = ("stream_consumer", "stream_classic")
Range = tuple[int, int, int]


class Stream:
    """A group of streaming runs."""

    def __init__(self, name: str, kafka: KafkaCluster, dagster: DagsterDeployment) -> None:
        self.name = name
        self.kafka = kafka
        self.dagster = dagster
        self.root = Path(dagster.home).parent
        self.produced = 0

    def produce(self) -> None:
        """Write some records to each partition."""
        # Members see all of these records at once.
        producer = Producer({**self.kafka.client_config(), "linger.ms": 1_000})
        for partition in range(PARTITIONS):
            for _ in range(RECORDS):
                producer.produce(self.name, b"x", partition=partition)
        producer.flush(120)
        self.produced += PARTITIONS * RECORDS

    def offsets(self) -> list[int]:
        """How many records of each partition are committed; 0 while Kafka does not say."""
        consumer = Consumer({**self.kafka.client_config(), "group.id": self.name})
        wanted = [Partition(self.name, number) for number in range(PARTITIONS)]
        try:
            return [max(0, found.offset) for found in consumer.committed(wanted, timeout=120)]
        except KafkaException:  # the coordinator of a new group has to be found first
            return [0] * PARTITIONS
        finally:
            consumer.close()

    def committed(self) -> int:
        """How many records are committed."""
        return sum(self.offsets())

    def stands(self, partition: int) -> bool:
        """Return whether one partition makes no progress while all others do."""
        before = self.offsets()[partition]
        self.produce()
        end = self.produced // PARTITIONS
        wait_until(
            lambda: all(o == end or n == partition for n, o in enumerate(self.offsets())) or None,
            timeout_s=240,
            what=f"the other partitions of {self.name}",
        )
        return self.offsets()[partition] == before

    def order(self, action: str, partition: int) -> None:
        """Give a directive: by the job for one group, by the command for the other."""
        which, reason = f"{self.name}:{partition}", "the test wants it"
        if self.name == STREAMS[0]:
            config = {"action": action, "partitions": [which], "reason": reason, "by": "a test"}
            job = f"{self.name}_control"
            ops = {"ops": {f"{job}_request": {"config": config}}}
            run_id = self.dagster.ui.launch("shop", job, ops)
            run = self.dagster.wait_for_run(run_id, timeout_s=240)
            assert run.status is dg.DagsterRunStatus.SUCCESS
            return
        said = self.typed(action, which, "-r", reason)
        assert said.startswith(f"{self.name}-{partition} {action}d by ")

    def typed(self, *arguments: str) -> str:
        """Run a command for the group, and return its output."""
        command = [sys.executable, "-m", "dagster_rebalance.cli", *arguments, "--group", self.name]
        env = {**os.environ, "DAGSTER_HOME": str(self.dagster.home)}
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    def owners(self) -> set[str]:
        """Return the owners of the partitions by the command `status`."""
        return {row["owner"] for row in json.loads(self.typed("status", "--json"))["partitions"]}

    def output(self) -> dict[str, list[Range]]:
        """Return the ranges that each run has written."""
        found = {}
        for file in (self.root / self.name).iterdir():
            lines = [line.split() for line in file.read_text().splitlines()]
            found[file.name] = [(int(a), int(b), int(c)) for a, b, c in lines]
        return found

    def live(self, instance: dg.DagsterInstance) -> list[dg.DagsterRun]:
        """Its streaming runs that have not ended."""
        runs = instance.get_runs(dg.RunsFilter(job_name=self.name))
        return [run for run in runs if not run.is_finished]

    def ended(self, instance: dg.DagsterInstance) -> list[dg.DagsterRun]:
        """Its streaming runs that have ended."""
        runs = instance.get_runs(dg.RunsFilter(job_name=self.name))
        return [run for run in runs if run.is_finished]

    def seen(self, instance: dg.DagsterInstance) -> str:
        """Its live runs, and the newest entry of each run's log with its age."""
        newest = [(run, instance.all_logs(run.run_id)[-1]) for run in self.live(instance)]
        return "; ".join(
            f"run {run.run_id} is {run.status.value}, {time.time() - entry.timestamp:.0f} s ago: "
            f"{entry.message}"
            for run, entry in newest
        )

    def wait(
        self, instance: dg.DagsterInstance, what: str, condition: Callable[[Stream], object]
    ) -> None:
        """Wait for something that the stream does."""
        wait_until(
            lambda: condition(self) or None,
            timeout_s=300,
            what=lambda: f"{self.name}: {what}; {self.seen(instance)}",
            interval_s=0.5,
        )

    def stop(self, instance: dg.DagsterInstance) -> list[str]:
        """Turn the sensor off, cancel runs until none is live, and return their ids.

        A tick that has begun may start runs after the sensor is off.
        """
        self.dagster.ui.stop_sensor("shop", f"{self.name}_sensor")
        cancelled: list[str] = []

        def ended(stream: Stream) -> bool:
            live = stream.live(instance)
            for run in live:
                if run.status is dg.DagsterRunStatus.STARTED and run.run_id not in cancelled:
                    cancelled.append(run.run_id)
                    stream.dagster.ui.cancel(run.run_id)
            return not live

        self.wait(instance, "its runs to end", ended)
        return cancelled

    def works(self, instance: dg.DagsterInstance, version: str) -> bool:
        """Whether two runs of a version, and no others, share the partitions and have no lag."""
        live = self.live(instance)
        if [run.tags.get(VERSION_TAG) for run in live] != [version] * 2:
            return False
        before = {run_id: len(ranges) for run_id, ranges in self.output().items()}
        self.produce()
        wait_until(lambda: self.committed() == self.produced or None, timeout_s=240, what=self.name)
        now = self.output()
        return all(len(now.get(run.run_id, ())) > before.get(run.run_id, 0) for run in live)


def _streams(kafka: KafkaCluster, dagster: DagsterDeployment, *names: str) -> list[Stream]:
    """Make the topics and folders of groups, and turn their sensors on."""
    streams = [Stream(name, kafka, dagster) for name in names]
    for stream in streams:
        (stream.root / stream.name).mkdir()
        kafka.create_topic(stream.name, PARTITIONS)
        dagster.ui.start_sensor("shop", f"{stream.name}_sensor")
    return streams


@pytest.mark.timeout(1200)
def test_streaming_runs_share_partitions_through_a_deploy_and_a_kill(
    kafka_broker: KafkaCluster, dagster: DagsterDeployment, root: Path
) -> None:
    streams = _streams(kafka_broker, dagster, *STREAMS)
    with dagster.instance() as instance:

        def each(what: str, condition: Callable[[Stream], object]) -> None:
            for stream in streams:
                stream.wait(instance, what, condition)

        each("two runs to share the work", lambda stream: stream.works(instance, "v1"))

        each(
            "their runs to be shown as the owners",
            lambda stream: (
                stream.owners() == {f"shop/{run.run_id[:8]}" for run in stream.live(instance)}
            ),
        )
        _pause_one_partition(streams, each)
        each("all partitions to go on", lambda stream: stream.works(instance, "v1"))

        (root / "version").write_text("v2")
        dagster.ui.reload("shop")
        each("the new code to take over", lambda stream: stream.works(instance, "v2"))
        assert {run.status for stream in streams for run in stream.ended(instance)} == {
            dg.DagsterRunStatus.SUCCESS
        }
        for stream in streams:
            done = Counter(range_ for ranges in stream.output().values() for range_ in ranges)
            assert set(done.values()) == {1}, "a deploy does nothing twice"

        killed = [stream.live(instance)[0] for stream in streams]
        for run in killed:
            os.kill(_process(instance, run), signal.SIGKILL)
        each(
            "another run in the place of the killed one",
            lambda stream: (
                not {run.run_id for run in killed} & {r.run_id for r in stream.live(instance)}
                and stream.works(instance, "v2")
            ),
        )
        for stream in streams:
            _check_output(stream, instance)
            stream.stop(instance)
        for stream in streams:
            assert _recorded(instance, stream.name) == stream.produced
            assert stream.owners() == {""}


@pytest.mark.timeout(1200)
def test_runs_without_signals_leave_when_dagster_cancels_them(
    kafka_broker: KafkaCluster, dagster: DagsterDeployment, root: Path
) -> None:
    version = (root / "version").read_text()
    (stream,) = _streams(kafka_broker, dagster, DETACHED)
    with dagster.instance() as instance:

        def wait(what: str, condition: Callable[[], object]) -> None:
            wait_until(lambda: condition() or None, timeout_s=300, what=what, interval_s=0.5)

        wait("two runs to share the work", lambda: stream.works(instance, version))

        killed = stream.live(instance)[0].run_id
        os.killpg(_session(root, killed), signal.SIGKILL)
        wait(
            "another run in the place of the killed one",
            lambda: (
                killed not in {run.run_id for run in stream.live(instance)}
                and stream.works(instance, version)
            ),
        )
        said = " ".join(entry.message for entry in instance.all_logs(killed))
        assert "sent no heartbeat" in said

        cancelled = stream.stop(instance)
        ends = {run.run_id: run.status for run in stream.ended(instance)}
        assert {ends[run_id] for run_id in cancelled} == {dg.DagsterRunStatus.CANCELED}
        for run_id in cancelled:
            process = Path("/proc", str(_session(root, run_id)))
            wait("its process to end", lambda process=process: not process.exists())  # type: ignore[misc]
        _check_output(stream, instance)
        assert _recorded(instance, stream.name) == stream.produced


def _session(root: Path, run_id: str) -> int:
    return int((root / "runs" / f"{run_id}.pid").read_text())


def _process(instance: dg.DagsterInstance, run: dg.DagsterRun) -> int:
    messages = " ".join(entry.message for entry in instance.all_logs(run.run_id))
    found = re.search(r"Executing steps in process \(pid: (\d+)\)", messages)
    assert found is not None
    return int(found[1])


def _check_output(stream: Stream, instance: dg.DagsterInstance) -> None:
    """Each offset is in one range, and each range was done by one run; a killed run aside."""
    ends = {run.run_id: run.status for run in instance.get_runs()}
    failed = dg.DagsterRunStatus.FAILURE
    done = Counter(
        range_
        for run_id, ranges in stream.output().items()
        if ends[run_id] is not failed
        for range_ in ranges
    )
    assert set(done.values()) == {1}
    everything = {range_ for ranges in stream.output().values() for range_ in ranges}
    for number in range(PARTITIONS):
        reached = 0
        for _, start, until in sorted(range_ for range_ in everything if range_[0] == number):
            assert start == reached, "ranges follow each other"
            reached = until
        assert reached * PARTITIONS == stream.produced


def _pause_one_partition(
    streams: list[Stream], each: Callable[[str, Callable[[Stream], object]], None]
) -> None:
    for stream in streams:
        stream.order("pause", 1)
    each("one partition to stand", lambda stream: stream.stands(1))
    for stream in streams:
        assert stream.stands(1), "it stays so"
        stream.order("resume", 1)


def _recorded(instance: dg.DagsterInstance, group_id: str) -> int:
    wanted = dg.AssetRecordsFilter(GroupAssets.of(group_id).offsets)
    records = instance.fetch_materializations(wanted, limit=1000).records
    total = 0
    for record in records:
        assert record.asset_materialization is not None
        value = record.asset_materialization.metadata["offsets"].value
        assert isinstance(value, int)
        total += value
    return total
