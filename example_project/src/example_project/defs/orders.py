"""Each run reads its batch of orders from Kafka with Spark and writes Parquet.

Copy this file as a start. Every code location that loads it takes a share of the topic's
partitions.
"""

import os

import dagster as dg

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    KafkaSparkResource,
    build_kafka_batch_defs,
)
from dagster_rebalance.spark.output import RANGE_KEY, write_parquet_by_range
from example_project.simulated_work import work_on


@dg.asset(kinds={"pyspark", "parquet"})
def orders(kafka_batch: KafkaBatch, spark: KafkaSparkResource) -> dg.MaterializeResult[None]:
    """Write every order exactly once: each range has its own file, which a repetition replaces."""
    records = kafka_batch.dataframe(spark)
    parsed = records.selectExpr(
        *RANGE_KEY, "offset", "from_json(string(value), 'number BIGINT, cents BIGINT') AS order"
    )
    work_on(kafka_batch)
    written = write_parquet_by_range(
        parsed.select(*RANGE_KEY, "offset", "order.*"), os.environ["ORDERS_PATH"]
    )
    return dg.MaterializeResult(metadata=kafka_batch.metadata(row_count=written))


kafka = KafkaConsumerResource(
    bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
    group_id=dg.EnvVar("KAFKA_GROUP"),
    topics=[os.environ.get("KAFKA_TOPIC", "orders")],
    group_protocol="classic" if os.environ.get("KAFKA_GROUP_PROTOCOL") == "classic" else "consumer",
    max_ranges_per_run=4,
    max_runs_in_flight=2,
    max_wait_s=0,  # an example has few records: show each at once
    shutdown_timeout_s=120,  # at most the time that your platform gives a code server to end
)

defs = build_kafka_batch_defs(
    kafka=kafka, assets=[orders], spark=KafkaSparkResource(remote=dg.EnvVar("SPARK_CONNECT_URL"))
)
