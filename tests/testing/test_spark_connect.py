"""The Spark Connect server is a real one, and reads from Kafka."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from pyspark.sql.connect.session import SparkSession

from dagster_rebalance.core.model.errors import DagsterRebalanceError, IllegalStateError
from dagster_rebalance.testing.spark_connect import SparkConnectServer

if TYPE_CHECKING:
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.spark


def test_spark_client_reads_a_topic(
    spark_connect_server: SparkConnectServer, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    """The connector's jars must match the server's Spark, on the driver and the executors."""
    topic = kafka_topic(partitions=2)
    producer = Producer({"bootstrap.servers": kafka_broker.bootstrap_servers})
    for number in range(100):
        producer.produce(topic, str(number))
    assert producer.flush(120) == 0
    spark = SparkSession.builder.remote(spark_connect_server.remote).create()
    try:
        options = {"kafka.bootstrap.servers": kafka_broker.bootstrap_servers, "subscribe": topic}
        rows = (
            spark.read.format("kafka")
            .options(**options)
            .load()
            .selectExpr("CAST(value AS STRING)")
            .collect()
        )
        assert sorted(int(row[0]) for row in rows) == list(range(100))
    finally:
        spark.stop()


def test_spark_server_that_cannot_start_is_reported_with_its_log() -> None:
    with pytest.raises(
        DagsterRebalanceError, match=r"Spark Connect ended with exit code 1(.|\n)*Master must"
    ):
        SparkConnectServer(master="no-such-master").start()


def test_kill_of_a_spark_server_that_was_not_started_is_refused() -> None:
    with pytest.raises(IllegalStateError, match="not started"):
        SparkConnectServer().kill()
