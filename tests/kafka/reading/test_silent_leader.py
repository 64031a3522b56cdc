"""An unavailable broker: its partitions have no answer, all other partitions have one.

No query returns an offset that does not exist.
"""

from __future__ import annotations

from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from dagster_rebalance import RebalanceAwareConsumer, TopicPartition
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import LogPosition, OffsetRange
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.kafka.reading.range_reader import RangeReader
from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from tests.kafka.readers import SMALL_FETCHES

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.broker

RECORDS = 3
PATIENCE_S = 120.0
PARTITIONS = [TopicPartition("orders", number) for number in range(3)]


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaCluster]:
    with KafkaCluster(nodes=3) as cluster:
        cluster.create_topic("orders", len(PARTITIONS))
        producer = Producer(cluster.client_config())
        for partition in PARTITIONS * RECORDS:
            producer.produce(partition.topic, b"order", partition=partition.partition)
        producer.flush(120)
        yield cluster


@contextmanager
def killed(kafka: KafkaCluster, node: int) -> Iterator[None]:
    """Kill a node, and restart it also after a failure, for the next test."""
    kafka.kill(node)
    try:
        yield
    finally:
        kafka.restart(node)


@pytest.mark.parametrize("offset", [0, 1], ids=["with a backlog", "at the end"])
def test_truncated_asks_several_brokers_at_once(kafka: KafkaCluster, offset: int) -> None:
    """A hand-over waits for this."""
    topic = f"events-{offset}"
    kafka.create_topic(topic, 30)
    partitions = [TopicPartition(topic, number) for number in range(30)]
    producer = Producer(kafka.client_config())
    for partition in partitions:
        producer.produce(topic, bytes(2_000), partition=partition.partition)
    producer.flush(120)
    positions = dict.fromkeys(partitions, LogPosition(offset, 0))
    cluster = Cluster(validated(kafka.client_config() | {"group.id": "etl"}, hold_limit_s=10))
    # A busy machine may be too slow often; one partition after another takes 3 s each time.
    assert any(
        cluster.truncated(positions, 0.9) == dict.fromkeys(positions, False) for _ in range(20)
    )


def test_end_offsets_of_an_unavailable_leader_raise_until_its_successor(
    kafka: KafkaCluster,
) -> None:
    """The client answers -1001 without an error, and keeps asking the old leader."""
    leaders = kafka.leaders("orders")
    (silent,) = [
        partition for partition in PARTITIONS if leaders[partition.partition] == leaders[0]
    ]
    others = [partition for partition in PARTITIONS if partition != silent]
    config = {**kafka.client_config(), "group.id": "reader", "log_level": 0}
    with RebalanceAwareConsumer(config, fetch=False) as consumer, ExitStack() as stack:
        assert consumer.end_offsets(PARTITIONS) == dict.fromkeys(PARTITIONS, RECORDS)
        stack.enter_context(killed(kafka, leaders[0]))
        with pytest.raises(BrokerError, match="orders-0") as caught:
            consumer.end_offsets(PARTITIONS, 1.0)
        assert caught.value.retriable
        assert set(caught.value.partitions) == {silent}
        assert consumer.end_offsets(others, 60.0) == dict.fromkeys(others, RECORDS)

        def with_timeout() -> dict[TopicPartition, int] | None:
            try:
                return consumer.end_offsets(PARTITIONS, 1.0)
            except BrokerError:
                return None

        found = wait_until(
            with_timeout, timeout_s=120, what="another leader, found by short queries"
        )
        assert found == dict.fromkeys(PARTITIONS, RECORDS)
        assert consumer.beginning_offsets(PARTITIONS, 60.0) == dict.fromkeys(PARTITIONS, 0)


def test_read_continues_at_the_next_leader(kafka: KafkaCluster) -> None:
    topic, count = unique_name("read"), 3_000
    kafka.create_topic(topic, 3)
    producer = Producer({**kafka.client_config(), "batch.num.messages": 100})
    for number in range(3 * count):
        producer.produce(topic, str(number), partition=number % 3)
    assert producer.flush(120) == 0
    config = {**kafka.client_config(), "group.id": "etl", "log_level": 0, **SMALL_FETCHES}
    with closing(RangeReader(validated(config, hold_limit_s=10))) as reader:
        ranges = [OffsetRange(topic, number, 0, count) for number in range(3)]
        records = reader.read(ranges, PATIENCE_S)
        first = [next(records) for _ in range(10)]
        kafka.kill(kafka.leaders(topic)[0])
        found = [(record.partition(), record.offset()) for record in (*first, *records)]
    for number in range(3):
        assert [at for part, at in found if part == number] == list(range(count))
