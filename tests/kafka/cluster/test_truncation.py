"""Truncated logs and recreated topics on a real broker."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaError, Message, Producer

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import LogPosition, TopicPartition
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.cluster import truncation
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.kafka.cluster.truncation import find_truncated
from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.local.host import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.testing.fixtures import TopicFactory

ORDERS = TopicPartition("orders", 0)
_HEADER = struct.Struct(">qi")


def cluster_of(bootstrap_servers: str) -> Cluster:
    return Cluster(
        validated({"bootstrap.servers": bootstrap_servers, "group.id": "etl"}, hold_limit_s=10)
    )


def produce(kafka: KafkaCluster, topic: str, records: int) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for number in range(records):
        producer.produce(topic, str(number), partition=0)
        producer.flush()


def cut(log: Path, at: int) -> None:
    data, place = log.read_bytes(), 0
    while place < len(data):
        offset, length = _HEADER.unpack_from(data, place)
        if offset >= at:
            break
        place += _HEADER.size + length
    os.truncate(log, place)


@pytest.fixture(scope="module")
def cut_off() -> Iterator[KafkaCluster]:
    with KafkaCluster() as kafka:
        kafka.create_topic("orders")
        produce(kafka, "orders", 20)
        kafka.shut_down()
        cut(next(Path(str(kafka._folder)).rglob("orders-0/00000000000000000000.log")), 10)
        kafka.restart()
        produce(kafka, "orders", 20)
        yield kafka


def test_truncated_compares_positions_with_their_leader_epoch(cut_off: KafkaCluster) -> None:
    """The bounds of the log look unchanged."""
    cluster = cluster_of(cut_off.bootstrap_servers)
    end = cluster.log_ends([ORDERS])[ORDERS]
    assert end.offset == 30
    assert end.leader_epoch
    for position, is_truncated in [
        (LogPosition(20, 0), True),
        (LogPosition(11, 0), True),
        (LogPosition(10, 0), False),
        (LogPosition(20, end.leader_epoch), False),
        (end, False),
    ]:
        assert cluster.truncated({ORDERS: position}) == {ORDERS: is_truncated}, position


def test_truncated_verifies_many_partitions_at_once(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(50)
    partitions = [TopicPartition(topic, number) for number in range(50)]
    cluster = cluster_of(kafka_broker.bootstrap_servers)
    assert cluster.truncated(cluster.log_ends(partitions)) == dict.fromkeys(partitions, False)
    assert cluster.truncated({}) == {}


def test_truncated_leaves_out_silent_leaders() -> None:
    settings = validated(
        {"bootstrap.servers": f"127.0.0.1:{free_port()}", "group.id": "etl"}, hold_limit_s=10
    )
    assert find_truncated(settings, {ORDERS: LogPosition(3, 1)}, 0.3) == {}


def test_truncated_raises_errors_of_the_client_without_a_partition() -> None:
    message = Message(error=KafkaError(KafkaError._AUTHENTICATION, "wrong password"))
    settings = validated({"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"}, hold_limit_s=10)
    with pytest.raises(BrokerError, match="offsets failed: wrong password") as caught:
        truncation._answer(message, settings)
    assert not caught.value.partitions


def test_topic_ids_change_when_a_topic_is_created_again(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    cluster = cluster_of(kafka_broker.bootstrap_servers)
    before = cluster.topic_ids([topic, "no-such-topic"])
    assert list(before) == [topic]
    kafka_broker.delete_topic(topic)
    kafka_broker.create_topic(topic)
    after = cluster_of(kafka_broker.bootstrap_servers).topic_ids([topic])
    assert after[topic]
    assert after != before


def test_high_watermark_is_after_an_open_transaction(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    producer = Producer(
        {"bootstrap.servers": kafka_broker.bootstrap_servers, "transactional.id": topic}
    )
    producer.init_transactions()
    producer.begin_transaction()
    for _ in range(3):
        producer.produce(topic, "x", partition=0)
    producer.flush()
    cluster, partition = cluster_of(kafka_broker.bootstrap_servers), TopicPartition(topic, 0)
    assert cluster.end_offsets([partition]) == {partition: 0}
    assert cluster.high_watermarks([partition]) == {partition: 3}
    producer.abort_transaction()
