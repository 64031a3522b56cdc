"""`only` in Spark: the rows of a filter are the records that pass it in Python and in Arrow."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Message, Producer

from dagster_rebalance.core.batches.pipes_payload import SentBatch
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource, RecordFilter
from dagster_rebalance.orchestration.storage.run_tags import format_range
from dagster_rebalance.spark.pipes_batch import PipesBatch
from dagster_rebalance.spark.ranges import functions_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_rebalance.core.batches.record_filter import RecordPredicate
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.spark
RECORDS, FILTERS = 400, 60
RANGES = [OffsetRange("orders", 0, 0, RECORDS)]
NAMED = ["kind", "Kind", "it's \\'", "ä"]
NAMES = [*NAMED, ""]
TEXTS = ["", "a", "ab", "ä", "'", "\\", "\x00"]
PARTS = [None, b"", b"a", b"ab", b"abc", "ä".encode(), b"\xc3", b"\xff\x00", b"'", b"\\", b"\x00"]


def a_message(draw: random.Random, offset: int) -> Message:
    names = draw.choices(NAMES, k=draw.randrange(4))
    headers: Any = [(name, draw.choice(PARTS)) for name in names]
    return Message(
        topic="orders",
        partition=0,
        offset=offset,
        key=draw.choice(PARTS),
        value=draw.choice(PARTS),
        headers=headers or draw.choice([None, []]),
    )


def a_filter(draw: random.Random) -> RecordFilter:
    return RecordFilter(
        header_equals={draw.choice(NAMED): draw.choice(TEXTS) for _ in range(draw.randrange(2))},
        header_in={
            draw.choice(NAMED): draw.choices(TEXTS, k=draw.randrange(1, 4))
            for _ in range(draw.randrange(3))
        },
        key_prefix=draw.choice([None, *TEXTS[1:]]),
        tombstones=draw.choice([True, False]),
    )


def test_filter_means_the_same_in_python_arrow_and_spark(session: SparkSession) -> None:
    draw = random.Random(37)  # noqa: S311 - no secret
    messages = [a_message(draw, offset) for offset in range(RECORDS)]
    filters = [a_filter(draw) for _ in range(FILTERS)]
    filters += [RecordFilter(key_prefix=text) for text in TEXTS[1:]]
    filters += [RecordFilter(header_in={name: TEXTS}) for name in NAMED]
    predicates: list[RecordPredicate] = [one.predicate() for one in filters]
    given = KafkaBatch.for_testing(RANGES, messages=messages)
    spark = SimpleNamespace(spark_session=session)
    frame = given.dataframe(spark, options={"includeHeaders": "true"})
    expr = functions_of(session).expr
    columns = [expr(one.sql).alias(f"f{number}") for number, one in enumerate(predicates)]
    rows = frame.select("offset", *columns).collect()
    passed = 0
    for number, (only, predicate) in enumerate(zip(filters, predicates, strict=True)):
        python = [one.offset() for one in messages if predicate.passes(one)]
        in_spark = sorted(row["offset"] for row in rows if row[f"f{number}"])
        assert all(row[f"f{number}"] is not None for row in rows)
        batch = KafkaBatch.for_testing(RANGES, messages=messages, only=only)
        in_arrow = batch.arrow().read_all().column("offset").to_pylist()
        assert python == in_spark == in_arrow, str(predicate)
        assert batch.left_out_records == RECORDS - len(python)
        passed += len(python)
    assert RECORDS < passed < RECORDS * len(filters) / 2


def test_frame_has_headers_only_if_they_are_wanted(session: SparkSession) -> None:
    messages = [
        Message(topic="orders", partition=0, offset=at, key=b"k", headers=[("n", b"%d" % at)])
        for at in range(3)
    ]
    spark = SimpleNamespace(spark_session=session)
    only = RecordFilter(header_in={"n": ["0", "2"]})
    batch = KafkaBatch.for_testing(RANGES, messages=messages, only=only)
    for options in (None, {"includeHeaders": "false"}, {"includeheaders": "TRUE"}):
        frame = batch.dataframe(spark, options=options)
        assert [row["offset"] for row in frame.orderBy("offset").collect()] == [0, 2]
        assert ("headers" in frame.columns) is ("includeheaders" in (options or {}))


@pytest.mark.broker
def test_readers_of_a_real_batch_return_the_same_records(
    session: SparkSession, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    producer = Producer(kafka_broker.client_config())
    draw = random.Random(7)  # noqa: S311 - no secret
    for number in range(200):
        message = a_message(draw, number)
        sent: Any = message.headers() or ()
        headers: Any = [(name, value) for name, value in sent if name]
        producer.produce(topic, message.value(), message.key(), number % 2, headers=headers)
    assert producer.flush(120) == 0
    ranges = [OffsetRange(topic, 0, 0, 60), OffsetRange(topic, 1, 10, 100)]
    only = RecordFilter(header_in={"kind": TEXTS, "Kind": TEXTS}, tombstones=False)
    kafka = KafkaConsumerResource(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        group_id="etl",
        topics=[topic],
        only=only,
    )
    batch = KafkaBatch(kafka=kafka, batch_id="real", ranges=[format_range(one) for one in ranges])
    places = sorted((one.partition(), one.offset()) for one in batch.messages())
    assert 5 < len(places) < 75
    frame = batch.dataframe(SimpleNamespace(spark_session=session))
    assert "headers" not in frame.columns
    assert sorted((row["partition"], row["offset"]) for row in frame.collect()) == places
    piped = PipesBatch.from_extras(batch.pipes_extras())
    assert isinstance(piped, SentBatch)
    options = {"bootstrap.servers": kafka_broker.bootstrap_servers}
    rows = piped.dataframe(session, options).select("partition", "offset").collect()
    assert sorted((row["partition"], row["offset"]) for row in rows) == places
