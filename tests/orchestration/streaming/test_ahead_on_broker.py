"""Streaming runs that claim ahead, on a real Kafka: a failure, a revoke and a kill -9.

In each case a batch is at work and the next one waits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import dagster as dg
import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import TopicPartition as Partition

from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.testing.deadline import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dagster_rebalance.core.model.claims import StoredPartition
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker
PARTITIONS = (0, 1)


class Line(NamedTuple):
    """A range in a file of `ahead_run`."""

    process: int
    partition: int
    start: int
    until: int
    attempt: int


class Group:
    """The streaming runs of one group."""

    def __init__(self, folder: Path, kafka: KafkaCluster, topic: str) -> None:
        self.folder = folder
        self.kafka = kafka
        self.topic = topic
        self.runs: list[subprocess.Popen[bytes]] = []

    def start(self) -> int:
        """Start a run, and return the id of its process."""
        command = [sys.executable, "-m", "tests.orchestration.streaming.ahead_run"]
        arguments = [str(self.folder), self.kafka.bootstrap_servers, self.topic]
        env = {**os.environ, "DAGSTER_HOME": str(self.folder)}
        log = (self.folder / f"run{len(self.runs)}.log").open("wb")
        run = subprocess.Popen([*command, *arguments], env=env, stdout=log, stderr=log)
        self.runs.append(run)
        return run.pid

    def end(self) -> None:
        for run in self.runs:
            run.terminate()
        for run in self.runs:
            run.wait(120)

    def produce(self, records: int) -> None:
        """Write records to each partition."""
        # Members see all of these records at once.
        producer = Producer({**self.kafka.client_config(), "linger.ms": 1_000})
        for partition in PARTITIONS:
            for _ in range(records):
                producer.produce(self.topic, b"x", partition=partition)
        producer.flush(120)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the batch at work until the end of the block."""
        (self.folder / "hold").touch()
        yield
        (self.folder / "hold").unlink()

    def lines(self, name: str) -> list[Line]:
        file = self.folder / name
        lines = file.read_text().splitlines() if file.exists() else []
        return [Line(*map(int, line.split())) for line in lines]

    def at_work(self, start: int) -> dict[int, int]:
        """The partition of each process that has begun a range with this start."""
        return {one.process: one.partition for one in self.lines("begun") if one.start == start}

    def stored(self) -> list[StoredPartition]:
        """What Kafka stores for each partition; empty while it does not say."""
        consumer = Consumer({**self.kafka.client_config(), "group.id": self.topic})
        try:
            wanted = [Partition(self.topic, number) for number in PARTITIONS]
            found = consumer.committed(wanted, timeout=120)
        except KafkaException:  # the coordinator of a new group has to be found first
            return []
        finally:
            consumer.close()
        return [decode(OffsetAndMetadata(max(0, p.offset), p.metadata or "")) for p in found]

    def waits(self) -> bool:
        """Whether a claimed range of each partition waits."""
        stored = self.stored()
        return bool(stored) and all(one.claims and one.claims[-1].is_early for one in stored)

    def is_holding(self) -> bool:
        """Whether a run holds a revoke."""
        with dg.DagsterInstance.local_temp(str(self.folder)) as instance:
            found = instance.fetch_observations(GroupAssets.of(self.topic).group, limit=10)
        kinds = (one.asset_observation for one in found.records)
        return any(one and "holding" in str(one.metadata) for one in kinds)

    def is_done(self, until: int) -> bool:
        return [one.next_offset for one in self.stored()] == [until] * len(PARTITIONS)

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        wait_until(lambda: condition() or None, timeout_s=300, what=what, interval_s=0.2)


@pytest.fixture
def group(tmp_path: Path, kafka_broker: KafkaCluster, kafka_topic: TopicFactory) -> Iterator[Group]:
    made = Group(tmp_path, kafka_broker, kafka_topic(len(PARTITIONS)))
    yield made
    (tmp_path / "hold").unlink(missing_ok=True)
    made.end()


@pytest.mark.timeout(900)
def test_next_batch_waits_through_a_failure_a_revoke_and_a_kill(group: Group) -> None:
    first = group.start()
    with group.held():
        group.produce(20)
        group.wait("a batch at work and one that waits", group.waits)
        (group.folder / "fail").touch()
    group.wait("all records", lambda: group.is_done(20))
    _check_order(group)

    with group.held():
        group.produce(20)
        group.wait("a batch at work and one that waits", group.waits)
        second = group.start()
        group.wait("the hold of a partition", group.is_holding)
    group.wait("all records", lambda: group.is_done(40))
    assert {line.process for line in group.lines("output") if line.start >= 25} == {first, second}
    _check_order(group)

    with group.held():
        group.produce(20)
        group.wait("two batches that wait", group.waits)
        group.wait("two batches at work", lambda: len(group.at_work(40)) == len(PARTITIONS))
        killed = group.at_work(40)[first]
        os.kill(first, signal.SIGKILL)
        group.wait("the end of the first run", lambda: group.runs[0].poll() is not None)
    group.wait("all records", lambda: group.is_done(60))
    _check_order(group)
    attempts = {
        line.start: line.attempt
        for line in group.lines("output")
        if line.partition == killed and line.start >= 40
    }
    assert attempts == {40: 2, 45: 1, 50: 1, 55: 1}, "only the range at work was an attempt"


def _check_order(group: Group) -> None:
    """Each offset is done once, and no range begins before the range before it is done."""
    for partition in PARTITIONS:
        done = [line for line in group.lines("output") if line.partition == partition]
        assert [line.start for line in done] == [0, *(line.until for line in done[:-1])]
        begun = [line.start for line in group.lines("begun") if line.partition == partition]
        assert all(before <= after for before, after in pairwise(begun))
