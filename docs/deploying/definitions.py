"""Definitions of which every difference between laptop and production is a variable."""

import os

import dagster as dg

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    KafkaSparkResource,
    build_kafka_stream_defs,
)
from dagster_rebalance.spark.output import write_parquet_by_range

IS_PRODUCTION = os.environ.get("ENVIRONMENT") == "production"
LOGIN = {
    "security_protocol": "SASL_SSL",
    "sasl_mechanism": "SCRAM-SHA-512",
    "sasl_username": dg.EnvVar("KAFKA_USERNAME"),
    "sasl_password": dg.EnvVar("KAFKA_PASSWORD"),
}


@dg.asset
def orders(kafka_batch: KafkaBatch, spark: KafkaSparkResource) -> dg.MaterializeResult:
    written = write_parquet_by_range(kafka_batch.dataframe(spark), os.environ["ORDERS_PATH"])
    return dg.MaterializeResult(metadata=kafka_batch.metadata(row_count=written))


defs = build_kafka_stream_defs(
    kafka=KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
        group_id=os.environ.get("KAFKA_GROUP", "orders-laptop"),
        topics=["orders"],
        **(LOGIN if IS_PRODUCTION else {}),
    ),
    assets=[orders],
    spark=KafkaSparkResource(remote=dg.EnvVar("SPARK_CONNECT_URL")),
    runs=2 if IS_PRODUCTION else 1,
)
