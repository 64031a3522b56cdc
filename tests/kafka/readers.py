"""Readers in one group on a real broker, and every record that they returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import TopicPartition as ClientPartition

from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from tests.kafka.consumers import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from dagster_rebalance.kafka.consumer.listener import AnyRebalanceListener
    from dagster_rebalance.kafka.consumer.state import PauseMarksPolicy
    from dagster_rebalance.testing.broker import KafkaCluster


SMALL_FETCHES = {
    "fetch.message.max.bytes": 2_000,
    "queued.min.messages": 1,
    "queued.max.messages.kbytes": 4,
}
"""So little is read ahead that a read is in the middle when its caller is."""


def commit_by_hand(config: Mapping[str, Any], *offsets: ClientPartition) -> None:
    """Commit offsets of a group without members: first, its coordinator has to be found."""
    consumer = Consumer(dict(config))

    def is_committed() -> bool:
        try:
            consumer.commit(offsets=list(offsets), asynchronous=False)
        except KafkaException:
            return False
        return True

    wait_until(is_committed, timeout_s=120, what=f"a commit of {config['group.id']}")
    consumer.close()


class Reader:
    """A consumer and every record that it returned."""

    def __init__(self, consumer: RebalanceAwareConsumer, topic: str) -> None:
        self.consumer = consumer
        self.topic = topic
        self.offsets: dict[int, list[int]] = {number: [] for number in range(4)}

    def poll(self, timeout_s: float = 0.1) -> None:
        for message in self.consumer.poll(timeout_s):
            assert message.error() is None
            self.offsets[message.partition() or 0].append(message.offset() or 0)

    def tp(self, number: int) -> TopicPartition:
        return TopicPartition(self.topic, number)

    @property
    def count(self) -> int:
        return sum(map(len, self.offsets.values()))


class Readers:
    """A topic of four partitions on a broker, and its readers in one group.

    Args:
        kafka: The broker.
        topic: The topic.
        protocol: `consumer`, `classic` (cooperative-sticky) or `range` (classic and eager).
    """

    def __init__(self, kafka: KafkaCluster, topic: str, protocol: str) -> None:
        self.protocol = protocol
        self.topic = topic
        self.config: dict[str, Any] = {
            "bootstrap.servers": kafka.bootstrap_servers,
            "group.id": unique_name("group"),
            "group.protocol": "consumer" if protocol == "consumer" else "classic",
            "auto.offset.reset": "earliest",
        }
        if protocol != "consumer":
            self.config.update({"session.timeout.ms": 6000, "heartbeat.interval.ms": 300})
        if protocol == "range":
            self.config["partition.assignment.strategy"] = "range"
        self.readers: list[Reader] = []
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 0})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reader(
        self,
        listener: AnyRebalanceListener | None = None,
        pause_marks: PauseMarksPolicy = "keep",
        *,
        same_poll: bool = False,
        **config: str,
    ) -> Reader:
        settings = {
            **self.config,
            **{name.replace("_", "."): value for name, value in config.items()},
        }
        consumer = RebalanceAwareConsumer(
            settings,
            hold_limit_s=30,
            probe_interval_s=0.5,
            pause_marks=pause_marks,
            complete_revoke_in_same_poll=same_poll,
        )
        reader = Reader(consumer, self.topic)
        reader.consumer.set_rebalance_listener(listener)
        reader.consumer.subscribe([self.topic])
        self.readers.append(reader)
        return reader

    def produce(self, each: int) -> None:
        for number in range(4):
            for _ in range(each):
                self._producer.produce(self.topic, b"record", partition=number)
        assert self._producer.flush(120) == 0

    def play(self, until: Callable[[], object], *readers: Reader, what: str) -> None:

        def step() -> bool:
            for reader in readers:
                reader.poll()
            return bool(until())

        wait_until(step, timeout_s=120, what=what, interval_s=0)

    def close(self) -> None:
        for reader in self.readers:
            reader.consumer.close(5.0)


class CommitOnRevoke(Listener):
    """Commits the positions in `on_partitions_revoked`."""

    def __init__(self) -> None:
        super().__init__(revoked=lambda _, consumer: consumer.commit_sync())
