"""The code location of the benchmarks of streaming runs: one body, in both forms.

What the body does, and for which topic, is in the environment (see `proofs.bench.streams`).
"""

import time

import dagster as dg

from dagster_rebalance import KafkaBatch, KafkaConsumerResource, KafkaSparkResource
from dagster_rebalance.orchestration.definitions import (
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from dagster_rebalance.spark.output import RANGE_KEY, write_parquet_by_range
from proofs.bench.spark_batches import COLUMNS
from proofs.bench.streams import BATCHES, STREAM, Body

BODY = Body.from_environment()


def _work(batch: KafkaBatch, spark: KafkaSparkResource | None) -> None:
    if BODY.sleep_s:
        time.sleep(BODY.sleep_s)
    if BODY.output and spark is not None:
        frame = batch.dataframe(spark).selectExpr(*COLUMNS, *RANGE_KEY[2:])
        write_parquet_by_range(frame, BODY.output)


def _kafka(group_id: str) -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers=BODY.brokers,
        group_id=group_id,
        topics=[BODY.topic],
        start_from="earliest" if BODY.output else "latest",
        max_records_per_range=BODY.records_per_range,
    )


@dg.asset
def streamed(kafka_batch: KafkaBatch) -> None:
    """The work of a streaming run that needs no Spark."""
    _work(kafka_batch, None)


@dg.asset
def streamed_through_spark(kafka_batch: KafkaBatch, spark: KafkaSparkResource) -> None:
    """The work of a streaming run through Spark Connect."""
    _work(kafka_batch, spark)


@dg.asset
def batched(kafka_batch: KafkaBatch) -> None:
    """The work of a run for each batch."""
    _work(kafka_batch, None)


defs = dg.Definitions.merge(
    build_kafka_stream_defs(
        kafka=_kafka(f"{BODY.group}-{STREAM}"),
        assets=[streamed_through_spark if BODY.remote else streamed],
        spark=KafkaSparkResource(remote=BODY.remote) if BODY.remote else None,
        name=STREAM,
        version="1",
        kafka_key="stream_kafka",
    ),
    build_kafka_batch_defs(
        kafka=_kafka(f"{BODY.group}-{BATCHES}"),
        assets=[batched],
        name=BATCHES,
        kafka_key="batch_kafka",
    ),
)
