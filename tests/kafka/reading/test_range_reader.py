"""Exact ranges of a real Kafka, whatever stands at their ends and whatever happens in between."""

from __future__ import annotations

import random
import threading
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as KafkaPartition

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError, IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.reading.range_reader import RangeReader
from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from dagster_rebalance.testing.local.kafka_node import admin_of
from tests.kafka.readers import SMALL_FETCHES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from confluent_kafka import Message

    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker

PATIENCE_S = 120.0


def reader_of(kafka: KafkaCluster, **settings: Any) -> RangeReader:  # noqa: ANN401 - settings of all kinds
    config = {**kafka.client_config(), "group.id": unique_name("etl"), "log_level": 0, **settings}
    return RangeReader(validated(config, hold_limit_s=10))


@pytest.fixture(scope="module")
def reader(kafka_broker: KafkaCluster) -> Iterator[RangeReader]:
    made = reader_of(kafka_broker)
    yield made
    made.close()


@pytest.fixture(scope="module")
def own_kafka() -> Iterator[KafkaCluster]:
    with KafkaCluster(settings={"log.cleaner.backoff.ms": "100"}) as kafka:
        yield kafka


def produce(kafka: KafkaCluster, topic: str, count: int, partitions: int = 1) -> None:
    producer = Producer({**kafka.client_config(), "batch.num.messages": 100})
    for number in range(count):
        for partition in range(partitions):
            producer.produce(topic, str(number), partition=partition)
    assert producer.flush(120) == 0


def transact(kafka: KafkaCluster, topic: str, count: int, *, is_aborted: bool = False) -> None:
    producer = Producer({**kafka.client_config(), "transactional.id": unique_name("transaction")})
    producer.init_transactions()
    producer.begin_transaction()
    for number in range(count):
        producer.produce(topic, f"t{number}", partition=0)
    producer.flush()
    (producer.abort_transaction if is_aborted else producer.commit_transaction)()


def produce_to_compact(kafka: KafkaCluster, topic: str, keys: str) -> None:
    producer = Producer(kafka.client_config())
    for day, key in enumerate(keys):
        producer.produce(topic, "x", key=key, partition=0, timestamp=(day + 1) * 86_400_000)
        producer.flush()


def offsets(messages: Iterator[Message]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for message in messages:
        assert message.error() is None
        key = str(message.topic()), message.partition() or 0
        found.setdefault(key, []).append(message.offset() or 0)
    return found


def test_read_returns_exactly_the_ranges_in_order(
    reader: RangeReader, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    orders, users = kafka_topic(4, prefix="orders"), kafka_topic(2, prefix="users")
    produce(kafka_broker, orders, 3000, 4)
    produce(kafka_broker, users, 50, 2)
    ranges = [
        OffsetRange(orders, 0, 5, 2017),
        OffsetRange(orders, 3, 60, 100),
        OffsetRange(orders, 3, 0, 10),
        OffsetRange(orders, 3, 10, 11),
        OffsetRange(users, 1, 49, 50),
    ]
    assert offsets(reader.read(ranges)) == {
        (orders, 0): list(range(5, 2017)),
        (orders, 3): [*range(11), *range(60, 100)],
        (users, 1): [49],
    }


def test_whole_topic_is_read_or_its_part_since_a_time(
    reader: RangeReader, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic, day_ms = kafka_topic(3), 86_400_000
    producer = Producer(kafka_broker.client_config())
    for day, partition in ((1, 0), (2, 0), (2, 1), (3, 0)):
        producer.produce(topic, "x", partition=partition, timestamp=day * day_ms)
        producer.flush()

    def read(since_ms: int | None) -> dict[tuple[str, int], list[int]]:
        return offsets(chain.from_iterable(reader.read_topic(topic, since_ms=since_ms)))

    assert read(None) == {(topic, 0): [0, 1, 2], (topic, 1): [0]}
    assert read(2 * day_ms) == {(topic, 0): [1, 2], (topic, 1): [0]}
    assert read(3 * day_ms) == {(topic, 0): [2]}
    assert read(4 * day_ms) == {}
    with pytest.raises(BrokerError, match="does not exist"):
        reader.read_topic(unique_name("none"))


def test_read_ends_at_an_offset_without_a_record(
    reader: RangeReader, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    partition = (topic, 0)
    produce(kafka_broker, topic, 3)
    transact(kafka_broker, topic, 2)
    assert offsets(reader.read([OffsetRange(topic, 0, 0, 6)])) == {partition: [0, 1, 2, 3, 4]}
    transact(kafka_broker, topic, 2, is_aborted=True)
    assert offsets(reader.read([OffsetRange(topic, 0, 4, 9)])) == {partition: [4]}
    for start, until in [(5, 6), (6, 7), (6, 8), (6, 9), (8, 9)]:
        assert offsets(reader.read([OffsetRange(topic, 0, start, until)])) == {}
    open_one = Producer({**kafka_broker.client_config(), "transactional.id": topic})
    open_one.init_transactions()
    open_one.begin_transaction()
    open_one.produce(topic, "open", partition=0)
    open_one.flush()
    assert offsets(reader.read([OffsetRange(topic, 0, 4, 9)])) == {partition: [4]}
    open_one.commit_transaction()
    assert offsets(reader.read([OffsetRange(topic, 0, 4, 9)])) == {partition: [4]}
    assert offsets(reader.read([OffsetRange(topic, 0, 6, 10)])) == {partition: [9]}


def test_read_uncommitted_returns_aborted_records(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    transact(kafka_broker, topic, 2, is_aborted=True)
    reader = reader_of(kafka_broker, **{"isolation.level": "read_uncommitted"})
    assert offsets(reader.read([OffsetRange(topic, 0, 0, 3)])) == {(topic, 0): [0, 1]}
    reader.close()


def test_read_ends_at_compacted_records(own_kafka: KafkaCluster) -> None:
    config = {
        "cleanup.policy": "compact",
        "segment.ms": "1000",
        "min.cleanable.dirty.ratio": "0.001",
    }
    own_kafka.create_topic("customers", config=config)
    produce_to_compact(own_kafka, "customers", "abcabcabcz")
    reader, partition = reader_of(own_kafka), ("customers", 0)
    wait_until(
        lambda: offsets(reader.read([OffsetRange(*partition, 0, 10)])) == {partition: [6, 7, 8, 9]},
        timeout_s=PATIENCE_S,
        what="the compaction",
    )
    assert offsets(reader.read([OffsetRange(*partition, 0, 6)])) == {}
    assert offsets(reader.read([OffsetRange(*partition, 3, 7)])) == {partition: [6]}
    reader.close()


def test_read_of_deleted_offsets_raises(
    reader: RangeReader, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    produce(kafka_broker, topic, 100, 2)
    admin = admin_of(kafka_broker.bootstrap_servers)
    admin.delete_records([KafkaPartition(topic, 0, 60)])[KafkaPartition(topic, 0)].result()
    gone = r"the log of \S+-0 begins at 60: the offsets \[50, 60\) were deleted"
    with pytest.raises(BrokerError, match=gone) as caught:
        list(reader.read([OffsetRange(topic, 0, 50, 100), OffsetRange(topic, 1, 0, 100)]))
    assert list(caught.value.partitions) == [TopicPartition(topic, 0)]
    assert not caught.value.retriable
    assert offsets(reader.read([OffsetRange(topic, 0, 60, 100)])) == {
        (topic, 0): list(range(60, 100))
    }


def test_read_names_deleted_offsets_if_the_leader_answers_late(
    reader: RangeReader,
    kafka_broker: KafkaCluster,
    kafka_topic: TopicFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = kafka_topic()
    produce(kafka_broker, topic, 100)
    admin = admin_of(kafka_broker.bootstrap_servers)
    admin.delete_records([KafkaPartition(topic, 0, 60)])[KafkaPartition(topic, 0)].result()
    ask, asked = reader._cluster.high_watermarks, []

    def late(
        partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        asked.append(partitions)
        if len(asked) == 1:
            message = "no answer"
            raise BrokerError(message, retriable=True)
        return ask(partitions, timeout_s)

    monkeypatch.setattr(reader._cluster, "high_watermarks", late)
    with pytest.raises(BrokerError, match=r"begins at 60: the offsets \[50, 60\) were deleted"):
        list(reader.read([OffsetRange(topic, 0, 50, 100)]))


def test_read_raises_if_offsets_are_deleted_during_it(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(kafka_broker, topic, 10_000)
    reader = reader_of(kafka_broker, **SMALL_FETCHES)
    records = reader.read([OffsetRange(topic, 0, 0, 10_000)])
    next(records)
    admin = admin_of(kafka_broker.bootstrap_servers)
    admin.delete_records([KafkaPartition(topic, 0, 9_000)])[KafkaPartition(topic, 0)].result()
    with pytest.raises(BrokerError, match=r"begins at 9000: the offsets \[\d+, 9000\)"):
        list(records)
    reader.close()


def test_read_beyond_the_end_of_the_log_raises(
    reader: RangeReader, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    produce(kafka_broker, topic, 10)
    for start in (0, 10, 12):
        with pytest.raises(BrokerError, match="ends at 10, before 15: it was truncated"):
            list(reader.read([OffsetRange(topic, 0, start, 15)]))


def test_read_waits_for_late_records_until_its_timeout(
    reader: RangeReader, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    producer = Producer({**kafka_broker.client_config(), "transactional.id": topic})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(topic, "late", partition=0)
    producer.flush()
    late = [OffsetRange(topic, 0, 0, 1)]
    with pytest.raises(BrokerError, match=r"could be read for 3 s.*transaction") as caught:
        list(reader.read(late, 3.0))
    assert caught.value.retriable
    records = reader.read(late, PATIENCE_S)
    found: list[Message] = []
    thread = threading.Thread(target=lambda: found.extend(records))
    thread.start()
    producer.commit_transaction()
    thread.join(PATIENCE_S)
    assert [message.value() for message in found] == [b"late"]


def test_read_survives_a_broker_restart_and_reports_an_outage(own_kafka: KafkaCluster) -> None:
    own_kafka.create_topic("orders")
    produce(own_kafka, "orders", 5_000)
    reader = reader_of(own_kafka, **SMALL_FETCHES)
    ranges = [OffsetRange("orders", 0, 0, 5_000)]
    records = reader.read(ranges, PATIENCE_S)
    first = [next(records) for _ in range(10)]
    own_kafka.kill()
    with pytest.raises(
        BrokerError, match="nothing of orders-0 at offset 0 could be read"
    ) as caught:
        list(reader.read(ranges, 3.0))
    assert caught.value.retriable
    assert own_kafka.bootstrap_servers in str(caught.value)
    own_kafka.restart()
    assert [message.offset() for message in (*first, *records)] == list(range(5_000))
    reader.close()


def test_sequential_reads_share_a_client_and_concurrent_ones_do_not(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    produce(kafka_broker, topic, 3000, 2)
    first, second = ([OffsetRange(topic, number, 0, 3000)] for number in range(2))
    reader = reader_of(kafka_broker)
    pairs = list(zip(reader.read(first), reader.read(second), strict=True))
    assert {(a.partition(), b.partition()) for a, b in pairs} == {(0, 1)}
    assert [a.offset() for a, _ in pairs] == [b.offset() for _, b in pairs] == list(range(3000))
    clients = list(reader._idle)
    assert len(clients) == 2
    next(reader.read(first))  # and abandoned
    assert offsets(reader.read(first)) == {(topic, 0): list(range(3000))}
    assert sorted(map(id, reader._idle)) == sorted(map(id, clients))
    late = reader.read(first)
    next(late)
    reader.close()
    assert len(list(late)) == 2999, "a read in progress is read to its end"
    assert not reader._idle
    with pytest.raises(IllegalStateError, match="the reader is closed"):
        next(reader.read(first))


def test_repeated_reads_with_one_client_are_exact(
    reader: RangeReader, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic, draw = kafka_topic(3), random.Random(7)  # noqa: S311 - no secret
    produce(kafka_broker, topic, 1000, 3)
    for _ in range(200):
        starts = {number: draw.randrange(1000) for number in draw.sample(range(3), 2)}
        untils = {number: draw.randint(start + 1, 1000) for number, start in starts.items()}
        ranges = [OffsetRange(topic, number, starts[number], untils[number]) for number in starts]
        assert offsets(reader.read(ranges)) == {
            (topic, number): list(range(starts[number], untils[number])) for number in starts
        }


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_read_does_not_touch_the_group(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory, protocol: str
) -> None:
    topic = kafka_topic()
    produce(kafka_broker, topic, 10)
    settings = {"group.id": unique_name("group"), "group.protocol": protocol}
    config = {**kafka_broker.client_config(), **settings}
    with RebalanceAwareConsumer(config, hold_limit_s=10, fetch=False) as member:
        member.subscribe([topic])
        partition = TopicPartition(topic, 0)
        wait_until(
            lambda: member.poll(0.1) or member.assignment(),
            timeout_s=PATIENCE_S,
            what="the assignment",
            interval_s=0,
        )
        member.commit_sync({partition: OffsetAndMetadata(4, "a claim")})
        reader = reader_of(kafka_broker, **settings)
        assert offsets(reader.read([OffsetRange(topic, 0, 4, 10)])) == {
            (topic, 0): list(range(4, 10))
        }
        reader.close()
        for _ in range(20):
            assert member.poll_with_rebalance(0.1).events == ()
        stored = member.committed([partition])[partition]
        assert stored is not None
        assert (stored.offset, stored.metadata) == (4, "a claim")


def test_first_read_names_a_refused_setting() -> None:
    config = {"bootstrap.servers": "nowhere:1", "group.id": "etl", "fetch.wait.max.ms": "soon"}
    reader = RangeReader(validated(config, hold_limit_s=10))
    with pytest.raises(ConfigurationError, match=r"fetch\.wait\.max\.ms"):
        next(reader.read([OffsetRange("orders", 0, 0, 1)]))
