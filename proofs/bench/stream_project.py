"""The code location of the benchmarks of streaming runs: one body, in both forms.

What the body does, and for which topic, is in the environment (see `proofs.bench.streams`).
"""

import time

import dagster as dg

from dagster_rebalance import KafkaBatch, KafkaConsumerResource
from dagster_rebalance.orchestration.definitions import (
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from proofs.bench.streams import BATCHES, STREAM, Body

BODY = Body.from_environment()


def _kafka(group_id: str) -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers=BODY.brokers,
        group_id=group_id,
        topics=[BODY.topic],
        start_from="latest",
    )


@dg.asset
def streamed(kafka_batch: KafkaBatch) -> None:  # noqa: ARG001 - only its claims and commits count
    """The work of a streaming run."""
    time.sleep(BODY.sleep_s)


@dg.asset
def batched(kafka_batch: KafkaBatch) -> None:  # noqa: ARG001 - only its claims and commits count
    """The work of a run for each batch."""
    time.sleep(BODY.sleep_s)


defs = dg.Definitions.merge(
    build_kafka_stream_defs(
        kafka=_kafka(f"{BODY.group}-{STREAM}"),
        assets=[streamed],
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
