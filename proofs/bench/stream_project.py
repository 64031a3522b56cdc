"""The code location of the benchmarks of streaming runs: one body in both forms.

Its settings are in the environment (`proofs.bench.streams`).
"""

import time

import dagster as dg

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    KafkaSparkResource,
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from dagster_rebalance.spark.output import write_parquet_by_range
from proofs.bench.spark_batches import BOUNDS, COLUMNS
from proofs.bench.streams import BATCHES, STREAM, Body

BODY = Body.from_environment()
SPARK = KafkaSparkResource(remote=BODY.remote) if BODY.remote else None


def _kafka(form: str) -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers=BODY.brokers,
        group_id=f"{BODY.group}-{form}",
        topics=[BODY.topic],
        start_from="earliest" if BODY.remote else "latest",
        max_records_per_range=BODY.records_per_range,
        max_wait_s=0,
    )


def _asset(form: str) -> dg.AssetsDefinition:
    """Make the asset: it works through Spark, or only sleeps."""
    if SPARK is None:

        @dg.asset(name=f"{form}_orders")
        def sleeps(kafka_batch: KafkaBatch) -> None:  # noqa: ARG001 - only its claims and commits count
            time.sleep(BODY.sleep_s)

        return sleeps

    @dg.asset(name=f"{form}_orders")
    def writes(kafka_batch: KafkaBatch, spark: KafkaSparkResource) -> None:
        frame = kafka_batch.dataframe(spark).selectExpr(*COLUMNS, *BOUNDS)
        write_parquet_by_range(frame, BODY.output)

    return writes


defs = dg.Definitions.merge(
    build_kafka_stream_defs(
        kafka=_kafka(STREAM),
        assets=[_asset(STREAM)],
        spark=SPARK,
        name=STREAM,
        version="1",
        kafka_key="stream_kafka",
    ),
    build_kafka_batch_defs(
        kafka=_kafka(BATCHES),
        assets=[_asset(BATCHES)],
        spark=SPARK,
        name=BATCHES,
        kafka_key="batch_kafka",
    ),
)
