"""Streaming runs write orders from Kafka to Parquet, with Spark.

`make demo ARGS=--spark` copies this file, runs it, and deploys a version with another CODE. So does
`ARGS=--cluster`.
"""

import json
import os
from pathlib import Path

import dagster as dg

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    KafkaSparkResource,
    build_kafka_stream_defs,
)
from dagster_rebalance.spark.output import RANGE_KEY, write_parquet_by_range

CODE = "v1"


@dg.asset(kinds={"pyspark", "parquet"})
def orders(kafka_batch: KafkaBatch, spark: KafkaSparkResource) -> dg.MaterializeResult[None]:
    """Write every order exactly once: each range has its own file, which a repetition replaces."""
    parsed = kafka_batch.dataframe(spark).selectExpr(
        *RANGE_KEY, "offset", "from_json(string(value), 'number BIGINT, cents BIGINT') AS order"
    )
    row_count = write_parquet_by_range(
        parsed.select(*RANGE_KEY, "offset", "order.*"), os.environ["ORDERS_PATH"]
    )
    return dg.MaterializeResult(metadata={"code": CODE, "dagster/row_count": row_count})


kafka = KafkaConsumerResource(
    bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
    group_id=dg.EnvVar("KAFKA_GROUP"),
    topics=[os.environ["KAFKA_TOPIC"]],
    group_protocol="classic" if os.environ["KAFKA_GROUP_PROTOCOL"] == "classic" else "consumer",
    client_config=json.loads(os.environ["KAFKA_CLIENT_CONFIG"]),
    # These two keep the demo short. The batch of a killed run counts as a failed attempt.
    record_every_s=2.0,
    records_per_minute=6_000.0,
    retry_delay_s=1.0,
)

defs = build_kafka_stream_defs(
    kafka=kafka,
    assets=[orders],
    # A Spark Connect server, or a cluster with one application per run.
    spark=KafkaSparkResource(
        remote=os.environ.get("SPARK_CONNECT_URL"),
        master=os.environ.get("SPARK_MASTER"),
        spark_config=json.loads(os.environ.get("SPARK_CONFIG", "{}")),
    ),
    # The number is in a text file beside this one, to scale out without a change of code.
    runs=int(Path(__file__).with_name("runs").read_text()),
)
