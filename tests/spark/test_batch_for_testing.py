"""A batch of given messages has the DataFrame of the same records in a real Kafka."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Message, Producer

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.run_tags import format_range
from dagster_rebalance.spark.output import write_parquet_by_range

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, Row, SparkSession

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = [pytest.mark.spark, pytest.mark.broker]


def rows(frame: DataFrame) -> list[Row]:
    return frame.orderBy("topic", "partition", "offset").collect()


def test_given_messages_become_the_rows_of_a_kafka_read(
    session: SparkSession, kafka_broker: KafkaCluster, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    topic = kafka_topic(2)
    producer = Producer(kafka_broker.client_config())
    for number in range(6):
        producer.produce(
            topic,
            None if number == 1 else f"value {number}",
            key=None if number == 2 else f"key {number}",
            headers=[("trace", b"\x00\x01"), ("trace", None)] if number % 2 else None,
            partition=number % 2,
        )
    assert producer.flush(120) == 0
    ranges = [OffsetRange(topic, 0, 0, 2), OffsetRange(topic, 0, 2, 3), OffsetRange(topic, 1, 1, 3)]
    kafka = KafkaConsumerResource(
        bootstrap_servers=kafka_broker.bootstrap_servers, group_id="etl", topics=[topic]
    )
    spark = SimpleNamespace(spark_session=session)
    real = KafkaBatch(kafka=kafka, batch_id="real", ranges=[format_range(one) for one in ranges])
    given = KafkaBatch.for_testing(ranges, messages=real.messages())
    for options in ({}, {"includeHeaders": "true"}):
        expected = real.dataframe(spark, options=options)
        found = given.dataframe(spark, options=options)
        assert found.dtypes == expected.dtypes
        assert ("headers" in found.columns) == bool(options)
        assert rows(found) == rows(expected)
    nanoseconds = Message(topic=topic, partition=0, offset=0, timestamp=(1, 1_764_000_000 * 10**9))
    odd = KafkaBatch.for_testing(ranges, messages=[nanoseconds])
    assert [row.timestamp for row in rows(odd.dataframe(spark))] == [None]
    with pytest.raises(ConfigurationError, match="startingOffsets"):
        given.dataframe(spark, options={"startingOffsets": "earliest"})
    assert write_parquet_by_range(given.dataframe(spark), str(tmp_path / "out")) == 5
