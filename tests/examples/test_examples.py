"""The examples as processes on a real broker."""

from __future__ import annotations

import re
import signal
import sqlite3
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from dagster_rebalance.testing.processes import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORD = re.compile(r"^\S+ (\d+) (\d+)$", re.MULTILINE)


class Stage:
    """A topic of four partitions, and examples that read it."""

    def __init__(self, kafka: KafkaCluster, topic: str, folder: Path, stack: ExitStack) -> None:
        self.kafka = kafka
        self.topic = topic
        self.folder = folder
        self.produced = 0
        self._stack = stack
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 0})

    def produce(self, each: int) -> None:
        """Append records of ten bytes to each partition."""
        for number in range(4 * each):
            self._producer.produce(self.topic, b"0123456789", partition=number % 4)
        assert self._producer.flush(120) == 0
        self.produced += 4 * each

    def start(self, example: str, *arguments: str) -> ChildProcess:
        """Run an example."""
        log = self.folder / f"{unique_name(Path(example).stem)}.log"
        command = [
            sys.executable,
            str(EXAMPLES / example),
            self.kafka.bootstrap_servers,
            self.topic,
            *arguments,
        ]
        return self._stack.enter_context(ChildProcess(example, command, log=log))


@pytest.fixture
def stage(kafka_broker: KafkaCluster, kafka_topic: TopicFactory, tmp_path: Path) -> Iterator[Stage]:
    """Return a stage whose processes end with the test."""
    with ExitStack() as stack:
        yield Stage(kafka_broker, kafka_topic(4), tmp_path, stack)


def wait(until: Callable[[], object], what: str, *examples: ChildProcess) -> None:
    """Wait for a condition; the error includes the output of the examples."""
    try:
        wait_until(lambda: bool(until()), timeout_s=120, what=what)
    except Exception as problem:
        raise AssertionError(
            "\n".join([str(problem), *(example.tail() for example in examples)])
        ) from problem


def end(example: ChildProcess) -> None:
    """Ctrl-C."""
    example.send(signal.SIGINT)
    assert example.wait(120) == 0, example.tail()


def worked_on(*examples: ChildProcess) -> Counter[tuple[str, str]]:
    """How often each record was worked on, by its partition and offset."""
    return Counter(
        record for example in examples for record in RECORD.findall(example.log.read_text())
    )


@pytest.mark.parametrize("example", ["kip983_loop.py", "asyncio_workers.py"])
def test_two_members_hand_over_and_process_each_record_once(stage: Stage, example: str) -> None:
    stage.produce(100)
    first = stage.start(example)
    wait(lambda: len(worked_on(first)) > 50, "the first one to work", first)
    second = stage.start(example)

    def has_a_share() -> bool:
        stage.produce(5)
        return bool(worked_on(second))

    wait(has_a_share, "the second one to have a share", first, second)
    end(first)
    wait(lambda: len(worked_on(first, second)) == stage.produced, "all records", first, second)
    end(second)
    assert set(worked_on(first, second).values()) == {1}


def test_sums_and_external_offsets_survive_a_kill(stage: Stage) -> None:
    stage.produce(100)
    path = stage.folder / "sums.db"

    def total() -> int:
        with sqlite3.connect(path) as database:
            tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            return (
                int(database.execute("SELECT coalesce(sum(bytes), 0) FROM sums").fetchone()[0])
                if tables
                else 0
            )

    first = stage.start("seek_to_external_offsets.py", str(path))
    wait(lambda: total() == 4000, "the first sums", first)
    first.kill()
    stage.produce(50)
    second = stage.start("seek_to_external_offsets.py", str(path), unique_name("another-group"))
    wait(lambda: total() == 6000, "the sums", second)
    end(second)
    assert total() == 6000


def test_records_come_only_from_warm_partitions(stage: Stage) -> None:
    stage.produce(25)
    example = stage.start("pause_until_warm.py")
    wait(
        lambda: example.log.read_text().count(stage.topic) == stage.produced, "all records", example
    )
    end(example)


def copied(stage: Stage, output: str) -> Counter[tuple[str, str]]:
    """Return how often each record was copied, for a reader of committed records."""
    reader = Consumer(
        {"bootstrap.servers": stage.kafka.bootstrap_servers, "group.id": unique_name("reader")}
    )
    found: Counter[tuple[str, str]] = Counter()
    try:
        numbers = list(range(4))
        ends = [
            reader.get_watermark_offsets(TopicPartition(output, number), timeout=120)[1]
            for number in numbers
        ]
        reader.assign([TopicPartition(output, number, 0) for number in numbers])

        def at_the_end() -> bool:
            for record in reader.consume(500, 0.1):
                assert record.error() is None
                _, number, offset = (record.value() or b"").decode().split()
                found[number, offset] += 1
            reached = reader.position([TopicPartition(output, number) for number in numbers])
            return all(tp.offset >= end for tp, end in zip(reached, ends, strict=True) if end)

        wait(at_the_end, "the end of the copies")
    finally:
        reader.close()
    return found


def test_transactions_commit_copies_and_offsets_through_a_hand_over(
    stage: Stage, kafka_topic: TopicFactory
) -> None:
    """Partitions are revoked in the middle of transactions, which are committed."""
    output = kafka_topic(4)
    stage.produce(100)
    first = stage.start("transactions.py", output)
    wait(lambda: "partitions" in first.log.read_text(), "a first transaction", first)
    second = stage.start("transactions.py", output)

    def has_a_share() -> bool:
        stage.produce(5)
        return "partitions" in second.log.read_text()

    wait(has_a_share, "the second one to have a share", first, second)
    end(first)
    wait(lambda: len(copied(stage, output)) == stage.produced, "all copies", first, second)
    end(second)
    assert set(copied(stage, output).values()) == {1}


INTERRUPTED_IN_A_COMMIT = """
import runpy, signal
import confluent_kafka

class Producer(confluent_kafka.Producer):
    def commit_transaction(self, *arguments):
        super().commit_transaction(*arguments)
        signal.raise_signal(signal.SIGINT)

confluent_kafka.Producer = Producer
runpy.run_path("transactions.py", run_name="__main__")
"""


def test_ctrl_c_during_a_commit_copies_each_record_once(
    stage: Stage, kafka_topic: TopicFactory
) -> None:
    output = kafka_topic(4)
    stage.produce(25)
    interrupted = stage.folder / "interrupted.py"
    interrupted.write_text(
        INTERRUPTED_IN_A_COMMIT.replace("transactions.py", str(EXAMPLES / "transactions.py"))
    )
    first = stage.start(str(interrupted), output)
    assert first.wait(120) == 0, first.tail()
    second = stage.start("transactions.py", output)
    stage.produce(5)
    wait(lambda: len(copied(stage, output)) == stage.produced, "all copies", first, second)
    end(second)
    assert set(copied(stage, output).values()) == {1}
