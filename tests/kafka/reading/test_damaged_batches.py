"""Batches that a broker stores and no client can read: each gives an error, in time.

The error names the topic, the partition and the offset, and other partitions go on.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import LogPosition, OffsetRange, TopicPartition
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.reading import fetcher as fetcher_module
from dagster_rebalance.kafka.reading import partition_watch
from dagster_rebalance.kafka.reading.range_reader import RangeReader
from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from tests.kafka.damage import CODECS, EACH, break_byte, break_format, break_length, produce_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.broker

PATIENCE_S = 120.0
SMALL = {
    "fetch.max.bytes": 4_000,
    "fetch.message.max.bytes": 4_000,
    "message.max.bytes": 2_000,
    "receive.message.max.bytes": 10_000,
}


@pytest.fixture(scope="module")
def own_kafka() -> Iterator[KafkaCluster]:
    with KafkaCluster() as kafka:
        yield kafka


def config_of(kafka: KafkaCluster, **settings: Any) -> dict[str, Any]:  # noqa: ANN401 - settings of all kinds
    return {
        **kafka.client_config(),
        "group.id": unique_name("etl"),
        "auto.offset.reset": "earliest",
        "log_level": 0,
        **settings,
    }


def damaged(
    kafka: KafkaCluster, damage: Callable[[KafkaCluster, str, int], None], codec: str = "none"
) -> str:
    topic = unique_name("orders")
    kafka.create_topic(topic, 2)
    for partition in (0, 1):
        produce_batches(kafka, topic, partition, codec)
    damage(kafka, topic, 0)
    return topic


class Polls:
    """A consumer, its records and its errors."""

    def __init__(self, topic: str, config: dict[str, Any]) -> None:
        self.consumer = RebalanceAwareConsumer(config)
        self.consumer.subscribe([topic])
        self.offsets: dict[int, list[int]] = {0: [], 1: []}
        self.errors: list[BrokerError] = []

    def poll(self) -> None:
        try:
            for record in self.consumer.poll(0.1):
                self.offsets[record.partition() or 0].append(record.offset() or 0)
        except BrokerError as error:
            self.errors.append(error)

    def until(self, condition: Callable[[], object], what: str) -> None:

        def step() -> bool:
            self.poll()
            return bool(condition())

        wait_until(step, timeout_s=PATIENCE_S, what=what, interval_s=0)


@pytest.mark.parametrize("codec", CODECS)
def test_range_reader_refuses_a_batch_with_a_broken_byte(
    own_kafka: KafkaCluster, codec: str
) -> None:
    topic = damaged(own_kafka, break_byte, codec)
    reader = RangeReader(validated(config_of(own_kafka), hold_limit_s=10))
    try:
        with pytest.raises(
            BrokerError, match=rf"{topic}-0 at offset {EACH}: .*failed CRC32C check.*reset"
        ) as caught:
            list(reader.read([OffsetRange(topic, 0, 0, 3 * EACH)]))
        assert caught.value.partitions.keys() == {TopicPartition(topic, 0)}
        assert not caught.value.retriable
        others = [
            OffsetRange(topic, 0, 0, EACH),
            OffsetRange(topic, 0, 2 * EACH, 3 * EACH),
            OffsetRange(topic, 1, 0, 3 * EACH),
        ]
        assert len(list(reader.read(others))) == 5 * EACH
    finally:
        reader.close()


@pytest.mark.parametrize("codec", CODECS)
def test_poll_repeats_the_error_of_a_broken_batch_and_never_skips_it(
    own_kafka: KafkaCluster, codec: str
) -> None:
    """The offset that librdkafka continues at must not reset the position."""
    topic = damaged(own_kafka, break_byte, codec)
    polls = Polls(topic, config_of(own_kafka))
    first = list(range(EACH))
    try:
        polls.until(lambda: len(polls.errors) >= 4, "the errors")
        for error in polls.errors:
            assert re.search(rf"{topic}-0 at offset {EACH}: .*failed CRC32C.*seek", str(error))
            assert error.partitions.keys() == {TopicPartition(topic, 0)}
        assert polls.offsets == {0: first, 1: list(range(3 * EACH))}
        produce_batches(own_kafka, topic, 1)
        polls.until(lambda: len(polls.offsets[1]) == 6 * EACH, "the other partition")
        assert polls.consumer.position(TopicPartition(topic, 0)) == EACH
        polls.consumer.seek(TopicPartition(topic, 0), 2 * EACH)
        polls.until(lambda: len(polls.offsets[0]) == 2 * EACH, "the records after the batch")
        assert polls.offsets[0] == [*first, *range(2 * EACH, 3 * EACH)]
    finally:
        polls.consumer.close()


def test_poll_repeats_the_error_of_an_unknown_batch_format(own_kafka: KafkaCluster) -> None:
    """The client itself reports it once or twice."""
    topic = damaged(own_kafka, break_format)
    polls = Polls(topic, config_of(own_kafka))
    try:
        polls.until(lambda: len(polls.errors) >= 4, "the errors")
        assert polls.offsets == {0: list(range(EACH)), 1: list(range(3 * EACH))}
        assert f"{topic}-0 at offset {EACH}: Unsupported Message(Set) MagicByte 7" in str(
            polls.errors[-1]
        )
    finally:
        polls.consumer.close()


def test_truncated_verifies_a_position_before_an_unknown_batch_format(
    own_kafka: KafkaCluster,
) -> None:
    topic = damaged(own_kafka, break_format)
    cluster = Cluster(validated(config_of(own_kafka), hold_limit_s=10))
    positions = {
        TopicPartition(topic, 0): LogPosition(EACH, 0),
        TopicPartition(topic, 1): LogPosition(EACH, 0),
    }
    assert cluster.truncated(positions, 30.0) == dict.fromkeys(positions, False)


def test_poll_reports_a_batch_that_the_client_drops_silently(
    own_kafka: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open transaction is no stall."""
    monkeypatch.setattr(partition_watch, "STALLED_AFTER_S", 1.0)
    monkeypatch.setattr(fetcher_module, "STALLED_AFTER_S", 1.0)
    monkeypatch.setattr(partition_watch, "CHECK_EVERY_S", 0.5)
    topic = damaged(own_kafka, break_length)
    producer = Producer({**own_kafka.client_config(), "transactional.id": unique_name("open")})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(topic, "not committed yet", partition=1)
    producer.flush()
    polls = Polls(topic, config_of(own_kafka))
    try:
        polls.until(lambda: len(polls.errors) >= 2, "the errors")
        assert polls.offsets == {0: list(range(EACH)), 1: list(range(3 * EACH))}
        for error in polls.errors:
            assert error.partitions.keys() == {TopicPartition(topic, 0)}
            assert f"{topic}-0 at offset {EACH}: nothing was read for" in str(error)
            assert "its log ends at 60" in str(error)
            assert "transaction" not in str(error)
    finally:
        polls.consumer.close()
        producer.abort_transaction()


def test_range_reader_blames_no_transaction_for_a_dropped_batch(own_kafka: KafkaCluster) -> None:
    topic = damaged(own_kafka, break_length)
    reader = RangeReader(validated(config_of(own_kafka), hold_limit_s=10))
    with pytest.raises(BrokerError, match=f"{topic}-0 at offset {EACH} could be read") as caught:
        list(reader.read([OffsetRange(topic, 0, 0, 3 * EACH)], timeout_s=8))
    assert "transaction" not in str(caught.value)
    assert "the batch there is damaged" in str(caught.value)


def test_oversized_record_is_reported_with_the_setting(own_kafka: KafkaCluster) -> None:
    topic = unique_name("orders")
    own_kafka.create_topic(topic, 1)
    producer = Producer(own_kafka.client_config())
    producer.produce(topic, "small", partition=0)
    producer.flush()
    producer.produce(topic, "x" * 50_000, partition=0)
    producer.flush()
    said = rf"increase receive\.message\.max\.bytes.*{topic}-0 at offset 1"
    reader = RangeReader(validated(config_of(own_kafka, **SMALL), hold_limit_s=10))
    with pytest.raises(BrokerError, match=said):
        list(reader.read([OffsetRange(topic, 0, 0, 2)]))
    polls = Polls(topic, config_of(own_kafka, **SMALL))
    try:
        polls.until(lambda: len(polls.errors) >= 2, "the errors")
        assert polls.offsets[0] == [0]
        for error in polls.errors:
            assert re.search(said, str(error))
    finally:
        polls.consumer.close()
