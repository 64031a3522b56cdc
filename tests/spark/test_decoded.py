"""Decoding in Spark from a real Kafka, in classic and Connect sessions."""

from __future__ import annotations

import base64
from contextlib import closing
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from dagster_rebalance import (
    BrokerError,
    IllegalStateError,
    KafkaBatch,
    KafkaConsumerResource,
    OffsetRange,
    SchemaRegistryResource,
    UndecodableError,
    plain_json,
)
from dagster_rebalance.decoding.decoder import Decoder, KnownSchemas
from dagster_rebalance.decoding.wire_format import SchemaText
from dagster_rebalance.orchestration.storage.run_tags import format_range
from dagster_rebalance.spark.decoded_frame import decoded_frame
from dagster_rebalance.spark.delta_and_iceberg import write_delta, write_iceberg
from dagster_rebalance.spark.output import write_parquet_by_range
from dagster_rebalance.spark.ranges import given_records
from tests.decoding.http_registry import PASSWORD, USER, HttpRegistry, http_registry
from tests.decoding.records import ORDER, avro, framed, proto_file, proto_message

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = [pytest.mark.spark, pytest.mark.broker]

POISON = b"\x00\x00\x00\x10\x00poison"
HEADERS: list[tuple[str, str | bytes | None]] = [
    ("trace", b"\x01"),
    ('"é\n', None),
    ("trace", b""),
    ("", b"\xff\x00"),
]
SCHEMAS = 10


@pytest.fixture(scope="module")
def registry() -> Iterator[HttpRegistry]:
    """A registry that asks for a password."""
    with http_registry() as running:
        running.login = "password"
        yield running


@pytest.fixture
def topic(kafka_topic: TopicFactory) -> str:
    return kafka_topic(2)


def produce(kafka: KafkaCluster, topic: str, registry: HttpRegistry) -> int:
    """Produce 200 orders of many schemas, a tombstone and a poison record; return the last id."""
    writers = []
    for number in range(SCHEMAS):
        more = {"name": f"f{number}", "type": "int", "default": number}
        schema = {**ORDER, "fields": [*ORDER["fields"], more]}
        writers.append((registry.register(f"{topic}-value", schema), schema))
    latest = registry.register(f"{topic}-value", ORDER)
    key_id = registry.register(f"{topic}-key", '"string"')
    producer = Producer(kafka.client_config())
    for number in range(200):
        schema_id, schema = writers[number % SCHEMAS]
        value = {"id": number, "item": "pen", f"f{number % SCHEMAS}": number}
        producer.produce(
            topic,
            avro(schema_id, schema, value),
            key=avro(key_id, "string", f"k{number}"),
            partition=number % 2,
        )
    producer.produce(topic, None, key=avro(key_id, "string", "gone"), partition=0)
    producer.produce(topic, POISON, key=b"plain", partition=0, headers=HEADERS)
    producer.produce(topic, avro(latest, ORDER, {"id": 200, "item": "cup"}), key=None, partition=0)
    assert producer.flush(120) == 0
    return latest


def batch_of(kafka: KafkaCluster, topic: str) -> KafkaBatch:
    """Return a batch without the first record of each partition."""
    resource = KafkaConsumerResource(
        bootstrap_servers=kafka.bootstrap_servers, group_id="etl", topics=[topic]
    )
    ranges = [OffsetRange(topic, 0, 1, 103), OffsetRange(topic, 1, 1, 100)]
    return KafkaBatch(
        kafka=resource, batch_id="decoded", ranges=[format_range(one) for one in ranges]
    )


def letters_in(kafka: KafkaCluster, topic: str) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Return key, value and headers of each record of a topic."""
    with closing(Consumer({**kafka.client_config(), "group.id": "letters"})) as consumer:
        _, until = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=120)
        consumer.assign([TopicPartition(topic, 0, 0)])
        found = consumer.consume(until, timeout=60.0)
    assert len(found) == until
    return [(one.key(), one.value(), dict(one.headers() or ())) for one in found]


def resource_of(registry: HttpRegistry) -> SchemaRegistryResource:
    return SchemaRegistryResource(url=registry.url, username=USER, password=PASSWORD)


def test_batch_of_many_schemas_is_decoded_with_letters(
    session: SparkSession,
    kafka_broker: KafkaCluster,
    kafka_topic: TopicFactory,
    registry: HttpRegistry,
    tmp_path: Path,
) -> None:
    topic = kafka_topic(2)
    produce(kafka_broker, topic, registry)
    spark, dead = SimpleNamespace(spark_session=session), kafka_topic(prefix="dead")
    batch, its = batch_of(kafka_broker, topic), resource_of(registry)
    registry.requests.clear()
    frame = batch.decoded(spark, value=its.avro(), key=its.avro(), dead_letters=dead)
    assert dict(frame.dtypes)["value"] == "struct<id:bigint,item:string>"
    assert write_parquet_by_range(frame, str(tmp_path / "out")) == 200
    rows = session.read.parquet(str(tmp_path / "out")).collect()
    assert sorted(row.value.id for row in rows if row.value) == list(range(2, 201))
    assert [row.key for row in rows if row.value is None] == ["gone"]
    assert len(registry.requests) == len(set(registry.requests))
    letters = letters_in(kafka_broker, dead)
    assert [(key, value) for key, value, _ in letters] == [(f"{topic}-0-101".encode(), POISON)]
    headers = letters[0][2]
    assert headers["trace"] == b""  # the last of two
    assert headers["dead_letter.key"] == b"plain"
    assert headers["dead_letter.offset"] == b"101"
    assert b"no schema with the id 4096" in headers["dead_letter.reason"]
    assert b"key: it begins with byte 112" in headers["dead_letter.reason"]
    # The same batch without Spark has the same letters, and the same records.
    again = kafka_topic(prefix="dead")
    table = batch.arrow(value=its.avro(), key=its.avro(), dead_letters=again).read_all()
    (without_spark,) = letters_in(kafka_broker, again)
    del headers["dead_letter.time_ms"], without_spark[2]["dead_letter.time_ms"]
    assert without_spark == letters[0]
    found = {(row["partition"], row["offset"]): row["value"] for row in table.to_pylist()}
    assert found == {(row.partition, row.offset): row.value and row.value.asDict() for row in rows}
    plan = str(getattr(frame, "_jdf", "") and frame._jdf.queryExecution().toString())
    assert PASSWORD not in plan


def test_undecodable_records_are_kept_or_fail_the_batch(
    session: SparkSession,
    kafka_broker: KafkaCluster,
    topic: str,
    registry: HttpRegistry,
    tmp_path: Path,
) -> None:
    produce(kafka_broker, topic, registry)
    spark, its = SimpleNamespace(spark_session=session), resource_of(registry)
    batch = batch_of(kafka_broker, topic)
    kept = batch.decoded(spark, value=its.avro(), keep_undecodable=True)
    (bad,) = kept.where("undecodable IS NOT NULL").collect()
    assert (bad.offset, bad.value, bytes(bad.undecodable.value)) == (101, None, POISON)
    assert [(one.key, one.value) for one in bad.headers] == HEADERS
    assert kept.count() == 201
    failing = batch.decoded(spark, value=its.avro())
    with pytest.raises(UndecodableError, match=f"at {topic}-0 offset 101 cannot be") as failed:
        write_parquet_by_range(failing, str(tmp_path / "out"))
    assert PASSWORD not in str(failed.value)
    only = batch.decoded(spark, value=its.avro(), ranges=batch.offset_ranges[1])
    assert only.selectExpr("count(value.id)").first() == (99,)
    with pytest.raises(BrokerError, match="does not exist"):
        batch.decoded(spark, value=its.avro(), dead_letters=f"no-{topic}")


def test_plain_json_is_decoded(
    session: SparkSession, kafka_broker: KafkaCluster, topic: str
) -> None:
    producer = Producer(kafka_broker.client_config())
    for number in range(103):
        producer.produce(topic, b'{"id": %d}' % number, partition=0)
        producer.produce(topic, b'{"id": "x"}' if number == 5 else b'{"id": 1}', partition=1)
    assert producer.flush(120) == 0
    schema = '{"type": "object", "properties": {"id": {"type": "integer"}}}'
    frame = batch_of(kafka_broker, topic).decoded(
        SimpleNamespace(spark_session=session), value=plain_json(schema), keep_undecodable=True
    )
    (bad,) = frame.where("undecodable IS NOT NULL").collect()
    assert (bad.partition, bad.offset) == (1, 5)
    assert bad.undecodable.reason == "value: it does not fit its schema: $.id against the rule type"


def test_timestamp_column_ignores_the_timestamp_type_of_the_session(session: SparkSession) -> None:
    at = datetime(2026, 1, 1, tzinfo=timezone.utc)
    records = [(b"k", b"{}", "orders", 0, 0, at, 0, None, 0, 1)]
    decoder = Decoder("value", "plain_json", SchemaText('{"type": "object"}'), KnownSchemas())
    session.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        ranges = [OffsetRange("orders", 0, 0, 1)]
        frame = given_records(session, records, ranges, {"includeHeaders": "true"})
        decoded = decoded_frame(frame, [decoder], "fail")
        assert dict(frame.dtypes)["timestamp"] == dict(decoded.dtypes)["timestamp"] == "timestamp"
        (row,) = decoded.selectExpr("CAST(timestamp AS DOUBLE) AS at").collect()
        assert row.at == at.timestamp()
    finally:
        session.conf.unset("spark.sql.timestampType")


def test_json_schema_keys_and_protobuf_values_are_decoded(
    session: SparkSession, kafka_broker: KafkaCluster, topic: str, registry: HttpRegistry
) -> None:
    place = {"type": "object", "properties": {"shop": {"type": "string"}}}
    key_id = registry.register(f"{topic}-key", place, "JSON")
    file = proto_file("shop", [proto_message("Order", id="int64")]).SerializeToString()
    value_id = registry.register(f"{topic}-value", base64.b64encode(file).decode(), "PROTOBUF")
    producer = Producer(kafka_broker.client_config())
    for number in range(103):
        key = framed(key_id, b'{"shop": "s%d"}' % number)
        value = framed(value_id, b"\x08%c" % number, indexes=b"\x00")
        producer.produce(topic, value, key=key, partition=0)
        producer.produce(topic, value, key=b"{}" if number == 5 else key, partition=1)
    assert producer.flush(120) == 0
    spark, its = SimpleNamespace(spark_session=session), resource_of(registry)
    frame = batch_of(kafka_broker, topic).decoded(
        spark, value=its.protobuf(), key=its.json_schema(), keep_undecodable=True
    )
    types = dict(frame.dtypes)
    assert (types["key"], types["value"]) == ("struct<shop:string>", "struct<id:bigint>")
    rows = frame.where("undecodable IS NULL").collect()
    assert sorted(row.value.id for row in rows if row.partition == 0) == list(range(1, 103))
    assert all(row.key.shop == f"s{row.value.id}" for row in rows)
    (bad,) = frame.where("undecodable IS NOT NULL").collect()
    assert (bad.partition, bad.offset) == (1, 5)


def test_missing_topic_is_an_empty_frame_that_changes_no_output(
    session: SparkSession, kafka_broker: KafkaCluster, registry: HttpRegistry, tmp_path: Path
) -> None:
    registry.register("payments-value", {**ORDER, "name": "Payment"})
    registry.register("refunds-value", {**ORDER, "fields": ORDER["fields"][:1]})
    kafka = KafkaConsumerResource(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        group_id="etl",
        topics=["payments", "refunds"],
    )
    batch = KafkaBatch(kafka=kafka, batch_id="b", ranges=["payments:0:0:10"])
    spark, its = SimpleNamespace(spark_session=session), resource_of(registry)
    ranges = [range_ for range_ in batch.offset_ranges if range_.topic == "refunds"]
    for options in ({}, {"includeHeaders": "true"}):
        frame = batch.dataframe(spark, ranges=ranges, options=options)
        assert frame.dtypes == batch.dataframe(spark, options=options).dtypes
        assert frame.collect() == []
    decoded = batch.decoded(spark, ranges=ranges, value=its.avro(), dead_letters="dead")
    assert dict(decoded.dtypes)["value"] == "struct<id:bigint>"
    for frame in (batch.dataframe(spark, ranges=ranges), decoded):
        assert write_parquet_by_range(frame, str(tmp_path / "out")) == 0
        write_delta(frame, str(tmp_path / "table"), ranges)
        write_iceberg(frame, "lake.refunds", ranges)
    assert not [path for path in tmp_path.iterdir() if not path.name.endswith("-staging")]
    rows = session.sql("SELECT 'refunds' AS topic, 0 AS partition, 1 AS offset")
    with pytest.raises(IllegalStateError, match=r"rows for lake\.refunds, but no ranges"):
        write_iceberg(rows, "lake.refunds", ranges)
