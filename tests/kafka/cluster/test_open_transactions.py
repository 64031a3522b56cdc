"""An open transaction withholds only its own committed offsets."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import confluent_kafka
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from dagster_rebalance import RebalanceAwareConsumer
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.cluster import committed_offsets
from dagster_rebalance.testing.deadline import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

LIMIT_S = 120.0
PARTITIONS = [confluent_kafka.TopicPartition("orders", number) for number in range(8)]


class Coordinator:
    """Answers as librdkafka does: with none of a request that has a partition of a transaction.

    Attributes:
        asked: How many partitions each request has, with its timeout.
    """

    def __init__(self, *kept: int, is_away: bool = False, starts_at: float = 0.0) -> None:
        self._kept = set(kept)
        self._is_away = is_away
        self._starts_at = starts_at
        self.now = 0.0
        self.asked: list[tuple[int, float]] = []

    def committed(
        self, partitions: list[confluent_kafka.TopicPartition], timeout: float
    ) -> list[confluent_kafka.TopicPartition]:
        self.asked.append((len(partitions), timeout))
        if (
            self._is_away
            or self.now < self._starts_at
            or not self._kept.isdisjoint(asked.partition for asked in partitions)
        ):
            self.now += timeout
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return [
            confluent_kafka.TopicPartition("orders", asked.partition, 5) for asked in partitions
        ]

    def read(self, timeout_s: float, number: int = 8) -> tuple[list[int], list[int]]:
        wanted = PARTITIONS[:number]
        found, waiting = committed_offsets.read(self, wanted, timeout_s, lambda: self.now)  # type: ignore[arg-type]
        return sorted(at.partition for at in found), sorted(at.partition for at in waiting)


def test_read_without_a_transaction_sends_one_request() -> None:
    coordinator = Coordinator()
    assert coordinator.read(1.0) == (list(range(8)), [])
    assert coordinator.asked == [(8, 1.0)]


def test_read_returns_partitions_outside_an_open_transaction() -> None:
    assert Coordinator(1, 6).read(10.0) == ([0, 2, 3, 4, 5, 7], [1, 6])


def test_read_at_its_timeout_reports_the_rest_as_waiting() -> None:
    coordinator = Coordinator(1)
    assert coordinator.read(1.0) == ([4, 5, 6, 7], [0, 1, 2, 3])
    assert coordinator.now <= committed_offsets.longest(1.0)


def test_read_from_an_unavailable_coordinator_raises() -> None:
    coordinator = Coordinator(is_away=True)
    with pytest.raises(KafkaException, match="_TIMED_OUT"):
        coordinator.read(1.0)
    assert len(coordinator.asked) == 2


@pytest.mark.parametrize("number", [1, 2, 8])
def test_read_from_a_coordinator_that_starts_late_finds_no_transaction(number: int) -> None:
    coordinator = Coordinator(starts_at=1.0)
    assert coordinator.read(1.0, number) == (list(range(number)), [])


def test_read_repeats_the_request_for_a_partition_before_it_reports_a_transaction() -> None:
    coordinator = Coordinator(0)
    assert coordinator.read(10.0, number=1) == ([], [0])
    assert [asked for asked, _ in coordinator.asked] == [1] * 4
    assert coordinator.now <= committed_offsets.longest(10.0)


@pytest.fixture
def pending(kafka_broker: KafkaCluster) -> Iterator[Callable[[str, str], Producer]]:
    producers: list[Producer] = []

    def send(group: str, topic: str) -> Producer:
        config = kafka_broker.client_config()
        committer = Consumer({**config, "group.id": group})
        at = [confluent_kafka.TopicPartition(topic, number, 5) for number in (0, 1)]

        def commit() -> object:
            try:
                return committer.commit(offsets=at, asynchronous=False)
            except KafkaException:  # the coordinator of a new group has to be found first
                return None

        wait_until(commit, timeout_s=LIMIT_S, what="the first commit of the group")
        producer = Producer({**config, "transactional.id": group})
        producers.append(producer)
        producer.init_transactions(LIMIT_S)
        producer.begin_transaction()
        producer.send_offsets_to_transaction(
            [confluent_kafka.TopicPartition(topic, 0, 9)],
            committer.consumer_group_metadata(),
            LIMIT_S,
        )
        committer.close()
        return producer

    yield send
    for producer in producers:
        producer.abort_transaction(LIMIT_S)


@pytest.mark.broker
@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_member_reads_partitions_outside_an_open_transaction(
    kafka_broker: KafkaCluster,
    kafka_topic: TopicFactory,
    pending: Callable[[str, str], Producer],
    protocol: str,
) -> None:
    topic = kafka_topic(partitions=2)
    kept, free = (TopicPartition(topic, number) for number in (0, 1))
    writer = Producer(kafka_broker.client_config())
    for partition in (0, 1):
        for _ in range(12):
            writer.produce(topic, b"x", partition=partition)
    writer.flush(LIMIT_S)
    transaction = pending(topic, topic)
    config = {
        **kafka_broker.client_config(),
        "group.id": topic,
        "group.protocol": protocol,
        "auto.offset.reset": "earliest",
    }
    with RebalanceAwareConsumer(config) as consumer:
        consumer.subscribe([topic])
        read = _first_records(consumer, {free})
        assert read == {free: 5}
        with pytest.raises(BrokerError, match="transaction that is still open") as told:
            consumer.committed([kept], 4.0)
        assert set(told.value.partitions) == {kept}
        assert told.value.retriable
        transaction.commit_transaction(LIMIT_S)
        transaction.begin_transaction()
        assert _first_records(consumer, {kept})[kept] == 9
        assert consumer.committed([kept])[kept] == OffsetAndMetadata(9)


def _first_records(
    consumer: RebalanceAwareConsumer, wanted: Collection[TopicPartition]
) -> dict[TopicPartition, int]:
    found: dict[TopicPartition, int] = {}
    until = time.monotonic() + LIMIT_S
    while not found.keys() >= set(wanted) and time.monotonic() < until:
        for record in consumer.poll(0.5):
            partition = TopicPartition(record.topic() or "", record.partition() or 0)
            found.setdefault(partition, record.offset() or 0)
    return found
