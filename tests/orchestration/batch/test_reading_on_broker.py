"""Runs of both forms read their batches from a real broker, without Spark."""

# No `from __future__ import annotations` here: Dagster evaluates the annotation of a batch.

import os
import signal
from typing import Any

import dagster as dg
import pytest
from confluent_kafka import Producer

from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.kafka.client.confluent import to_commit
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.definitions import (
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.run_tags import STREAM_TAG, run_config, run_tags
from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.fixtures import TopicFactory, unique_name
from tests.kafka.readers import commit_by_hand
from tests.orchestration.parts import batch_request, claimed

pytestmark = [pytest.mark.broker, pytest.mark.parametrize("protocol", ["consumer", "classic"])]


class Shop:
    def __init__(self, broker: KafkaCluster, topic: str, protocol: Any) -> None:  # noqa: ANN401 - a literal
        self.topic = topic
        self.config = broker.client_config()
        self.kafka = KafkaConsumerResource(
            bootstrap_servers=broker.bootstrap_servers,
            group_id=unique_name("group"),
            topics=[topic],
            group_protocol=protocol,
        )
        self.values: list[bytes | None] = []
        self.readers: list[Any] = []

    def sell(self, item: str) -> None:
        producer = Producer({**self.config, "transactional.id": unique_name("till")})
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce(self.topic, item, partition=0)
        producer.commit_transaction()

    def read(self, batch: KafkaBatch) -> None:
        self.values += [message.value() for message in batch.messages()]
        self.readers.append(batch._reader)


@pytest.fixture
def shop(kafka_broker: KafkaCluster, kafka_topic: TopicFactory, protocol: str) -> Shop:
    made = Shop(kafka_broker, kafka_topic(), protocol)
    made.sell("pen")
    return made


def test_per_batch_run_reads_its_batch(instance: dg.DagsterInstance, shop: Shop) -> None:
    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        shop.read(kafka_batch)

    @dg.asset
    def customers(kafka_batch: KafkaBatch) -> None:
        shop.read(kafka_batch)

    job = build_kafka_batch_defs(kafka=shop.kafka, assets=[orders, customers]).resolve_job_def(
        "kafka_batches"
    )
    batch_id = unique_name("batch")
    wanted = batch_request(batch_id, range_ := OffsetRange(shop.topic, 0, 0, 2))
    claim = to_commit(range_.topic_partition, claimed(0, 2, batch_id))
    commit_by_hand({**shop.config, "group.id": shop.kafka.group_id}, claim)
    result = job.execute_in_process(
        instance=instance,
        tags=run_tags(wanted, shop.kafka.group_id),
        run_config=run_config(wanted, "kafka_batch"),
    )
    assert result.success
    assert shop.values == [b"pen", b"pen"]
    (reader,) = set(shop.readers)
    assert reader._is_closed
    assert not reader._idle


def test_streaming_run_reads_batches_with_one_client(
    instance: dg.DagsterInstance, shop: Shop
) -> None:
    clients: list[int] = []

    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        shop.read(kafka_batch)
        clients.extend(map(id, shop.readers[-1]._idle))
        if len(shop.values) < 3:
            shop.sell("cup")
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    job = build_kafka_stream_defs(kafka=shop.kafka, assets=[orders], name="stream").resolve_job_def(
        "stream"
    )
    job.execute_in_process(instance=instance, tags={STREAM_TAG: "here:sensor"})
    assert shop.values == [b"pen", b"cup", b"cup"]
    assert len(clients) == 3
    assert len(set(clients)) == 1
    (reader,) = set(shop.readers)
    assert not reader._idle


def test_group_starts_at_a_time(
    instance: dg.DagsterInstance,
    kafka_broker: KafkaCluster,
    kafka_topic: TopicFactory,
    protocol: Any,  # noqa: ANN401 - a literal
) -> None:
    """A partition without later records starts at its end."""
    topic = kafka_topic(partitions=2)
    producer = Producer(kafka_broker.client_config())
    for value, partition, at_s in (
        *(("too old", 0, 1000), ("at once", 0, 2000), ("later", 0, 3000)),
        *(("too old", 1, 1000), ("too old", 1, 1999)),
    ):
        producer.produce(topic, value, partition=partition, timestamp=at_s * 1000)
    assert producer.flush(120) == 0
    kafka = KafkaConsumerResource(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        group_id=unique_name("group"),
        topics=[topic],
        group_protocol=protocol,
        start_from="1970-01-01T00:33:20Z",
    )
    values: list[bytes | None] = []

    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        values.extend(message.value() for message in kafka_batch.messages())
        if b"new" not in values and {b"at once", b"later"} <= set(values):
            producer.produce(topic, "new", partition=1)
            assert producer.flush(120) == 0
        elif b"new" in values:
            os.kill(os.getpid(), signal.SIGTERM)

    job = build_kafka_stream_defs(kafka=kafka, assets=[orders], name="timed").resolve_job_def(
        "timed"
    )
    job.execute_in_process(instance=instance, tags={STREAM_TAG: "here:sensor"})
    # A slow machine may interrupt a batch, which then begins again.
    assert list(dict.fromkeys(values)) == [b"at once", b"later", b"new"]
