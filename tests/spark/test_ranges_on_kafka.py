"""Reads of exact offset ranges from a real Kafka, in classic and Connect sessions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Message, Producer
from confluent_kafka import TopicPartition as KafkaPartition

from dagster_rebalance import KafkaBatch, KafkaConsumerResource
from dagster_rebalance.core.model.errors import BrokerError, IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.orchestration.batch.records import GivenMessages
from dagster_rebalance.orchestration.storage.run_tags import format_range
from dagster_rebalance.spark.kafka_options import spark_kafka_options
from dagster_rebalance.spark.output import write_parquet_by_range
from dagster_rebalance.spark.ranges import _read_round, read_ranges
from dagster_rebalance.spark.spark_jobs import is_connect
from dagster_rebalance.testing.local.kafka_node import admin_of
from tests.spark.producing import produce

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = [pytest.mark.spark, pytest.mark.broker]


@pytest.fixture(params=[None, "avro,csv,json,orc,parquet,text"], ids=["default", "as streams"])
def source(session: SparkSession, request: pytest.FixtureRequest) -> Iterator[None]:
    """Read with Spark's default source, and with the source of streaming queries."""
    setting = "spark.sql.sources.useV1SourceList"
    if request.param:
        session.conf.set(setting, request.param)
    yield
    session.conf.unset(setting)


def filled(kafka: KafkaCluster, topic: str, count: int, partitions: int = 1) -> dict[str, str]:
    """Fill each partition with `count` records, and return the connection settings."""
    config = {"bootstrap.servers": kafka.bootstrap_servers}
    for partition in range(partitions):
        produce(config, topic, map(str, range(count)), partition=partition)
    return config


def offsets(frame: DataFrame) -> list[tuple[str, int, int, int, int]]:
    """Return topic, partition, offset and range bounds of each record, sorted."""
    rows = frame.select("topic", "partition", "offset", "range_start", "range_until").collect()
    return sorted(
        (row["topic"], row["partition"], row["offset"], row["range_start"], row["range_until"])
        for row in rows
    )


def expected(ranges: list[OffsetRange]) -> list[tuple[str, int, int, int, int]]:
    return sorted(
        (one.topic, one.partition, offset, one.start, one.until)
        for one in ranges
        for offset in range(one.start, one.until)
    )


@pytest.mark.usefixtures("source")
def test_exactly_the_ranges_are_read_with_their_bounds(
    session: SparkSession, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    orders, users = kafka_topic(4, prefix="orders"), kafka_topic(2, prefix="users")
    kafka = filled(kafka_broker, orders, 100, 4)
    filled(kafka_broker, users, 50, 2)
    ranges = [
        OffsetRange(orders, 0, 5, 17),
        OffsetRange(orders, 3, 0, 10),
        OffsetRange(orders, 3, 10, 11),
        OffsetRange(orders, 3, 60, 100),
        OffsetRange(orders, 3, 20, 30),
        OffsetRange(users, 1, 49, 50),
    ]
    frame = read_ranges(session, ranges, kafka)
    assert offsets(frame) == expected(ranges)
    assert frame.columns[:5] == ["key", "value", "topic", "partition", "offset"]


@pytest.mark.usefixtures("source")
def test_records_of_aborted_transactions_are_not_read(
    session: SparkSession, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    kafka = filled(kafka_broker, topic, 3)
    producer = Producer({**kafka, "transactional.id": topic})
    producer.init_transactions()
    for end in (producer.abort_transaction, producer.commit_transaction):
        producer.begin_transaction()
        producer.produce(topic, end.__name__)
        producer.flush()
        end()
    frame = read_ranges(session, [OffsetRange(topic, 0, 0, 7)], kafka)
    assert [row["value"].decode() for row in frame.orderBy("offset").collect()] == [
        "0",
        "1",
        "2",
        "commit_transaction",
    ]


@pytest.mark.usefixtures("source")
def test_offsets_deleted_by_retention_fail_the_write(
    session: SparkSession, kafka_broker: KafkaCluster, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    topic = kafka_topic()
    kafka = filled(kafka_broker, topic, 100)
    admin = admin_of(kafka_broker.bootstrap_servers)
    admin.delete_records([KafkaPartition(topic, 0, 60)])[KafkaPartition(topic, 0)].result()
    frame = read_ranges(session, [OffsetRange(topic, 0, 50, 100)], kafka)
    with pytest.raises(BrokerError, match=r"\[\d+, 100\).*retention") as caught:
        write_parquet_by_range(frame, str(tmp_path / "out"))
    assert list(caught.value.partitions) == [TopicPartition(topic, 0)]


@pytest.mark.parametrize("own", [{}, {"kafka.group.id": "etl"}], ids=["drawn", "of the user's"])
def test_cached_clients_are_reused_for_the_same_log_only(
    own: dict[str, str],
    session: SparkSession,
    kafka_broker: KafkaCluster,
    kafka_topic: TopicFactory,
) -> None:
    """Cached clients return prefetched records, even of a deleted topic."""
    topic = kafka_topic()
    kafka = filled(kafka_broker, topic, 20)

    def values(start: int, until: int, clients: str) -> list[str]:
        ranges = [OffsetRange(topic, 0, start, until)]
        frame = read_ranges(session, ranges, {**kafka, **own}, clients=clients)
        return [row[0] for row in frame.selectExpr("CAST(value AS STRING)").collect()]

    assert values(0, 10, "the run-0") == [str(number) for number in range(10)]
    kafka_broker.delete_topic(topic)
    kafka_broker.create_topic(topic, 1)
    produce(kafka, topic, ["new"] * 20, partition=0)
    assert values(10, 15, "the run-0") == [str(number) for number in range(10, 15)], "kept"
    assert values(10, 20, "the run-1") == ["new"] * 10
    assert values(15, 20, "") == ["new"] * 5


def test_second_write_replaces_only_its_ranges(
    session: SparkSession, kafka_broker: KafkaCluster, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    topic, path = kafka_topic(2), str(tmp_path / "out")
    kafka = filled(kafka_broker, topic, 100, 2)
    first, second = (
        [OffsetRange(topic, 0, 0, 40)],
        [OffsetRange(topic, 0, 40, 100), OffsetRange(topic, 1, 0, 100)],
    )

    def write(ranges: list[OffsetRange]) -> None:
        write_parquet_by_range(read_ranges(session, ranges, kafka), path)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, [first, second]))
    write(second[:1])
    assert offsets(session.read.parquet(path)) == expected(first + second)
    frame = read_ranges(session, first, kafka)
    write_parquet_by_range(frame.where("offset < 20"), path)
    with pytest.raises(IllegalStateError, match="one call"):
        write_parquet_by_range(frame.where("offset >= 20"), path)


def test_record_outside_of_the_ranges_fails_the_read(
    session: SparkSession, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()
    kafka = spark_kafka_options(filled(kafka_broker, topic, 10))
    everything = {"startingTimestamp": "0", "endingTimestamp": "9999999999999"}
    frame = _read_round(session, [(OffsetRange(topic, 0, 2, 5),)], {**kafka, **everything}, {})
    with pytest.raises(Exception, match="is in no range of the batch"):
        frame.select("value").collect()


def test_connect_server_is_asked_for_the_schema_only_at_the_first_write(
    session: SparkSession,
    kafka_broker: KafkaCluster,
    kafka_topic: TopicFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_connect(session):
        pytest.skip("a classic session has no server")
    topic = kafka_topic()
    config = filled(kafka_broker, topic, 2)
    on_server: Any = session
    client: Any = type(on_server.client)
    analyze: Any = client._analyze
    asked: list[str] = []

    def counted(self: object, method: str, **arguments: object) -> object:
        asked.append(method)
        return analyze(self, method, **arguments)

    for start in (0, 1):
        if start:
            monkeypatch.setattr(client, "_analyze", counted)
        frame = read_ranges(session, [OffsetRange(topic, 0, start, start + 1)], config)
        assert asked == []
        assert write_parquet_by_range(frame.drop("key"), str(tmp_path / "out")) == 1
    assert asked == []


def test_range_of_several_tasks_is_one_file(
    session: SparkSession, kafka_broker: KafkaCluster, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    topic = kafka_topic()
    kafka = {"bootstrap.servers": kafka_broker.bootstrap_servers}
    producer = Producer(kafka)
    for number in range(40):
        producer.produce(topic, str(number), headers=[("trace", str(number).encode())])
    assert producer.flush(120) == 0
    options = {"includeHeaders": "true", "minPartitions": "4"}
    frame = read_ranges(session, [OffsetRange(topic, 0, 0, 40)], kafka, connector_options=options)
    found = frame.selectExpr("spark_partition_id() AS task", "value", "headers[0].value AS trace")
    rows = found.collect()
    assert len({row["task"] for row in rows}) == 4
    assert all(row["value"] == row["trace"] for row in rows)
    assert write_parquet_by_range(frame, str(tmp_path / "out")) == 40
    assert [file.name for file in (tmp_path / "out").rglob("*.parquet")] == ["0-40.parquet"]


def test_records_of_a_replay_are_one_read_with_those_from_kafka(
    session: SparkSession, kafka_broker: KafkaCluster, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    """A letter of a record that Kafka has deleted, and a letter of a range."""
    topic = kafka_topic(1)
    filled(kafka_broker, topic, 30)
    ranges = [OffsetRange(topic, 0, 3, 4), OffsetRange(topic, 0, 10, 15)]
    kafka = KafkaConsumerResource(
        bootstrap_servers=kafka_broker.bootstrap_servers, group_id=topic, topics=[topic]
    )
    batch = KafkaBatch(kafka=kafka, batch_id="r.abc.1", ranges=[*map(format_range, ranges)])
    copy = Message(topic=topic, partition=0, offset=3, value=b"copy", timestamp=(0, 0))
    batch._replayed = GivenMessages(ranges[:1], [copy])
    spark = SimpleNamespace(spark_session=session, allow_plaintext=True)
    frame = batch.dataframe(spark)
    assert offsets(frame) == expected(ranges)
    assert offsets(batch.dataframe(spark, ranges=ranges[0])) == expected(ranges[:1])
    assert offsets(batch.dataframe(spark, ranges=ranges[1])) == expected(ranges[1:])
    path = str(tmp_path / "output")
    assert write_parquet_by_range(frame.selectExpr("*", "string(value) AS text"), path) == 6
    rows = {(row["range_start"], row["text"]) for row in session.read.parquet(path).collect()}
    assert rows == {(3, "copy"), *((10, str(number)) for number in range(10, 15))}
    assert [message.value() for message in batch.messages()][:2] == [b"copy", b"10"]
