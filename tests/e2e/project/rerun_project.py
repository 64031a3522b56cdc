"""The groups of the test of reruns: one of each form of run.

The output of a range is a file with the version of the code and the records. A rerun waits while
its gate is closed.
"""

import os
import time
from pathlib import Path

import dagster as dg

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)

ROOT = Path(os.environ["E2E_ROOT"], "reruns")
VERSION = (ROOT / "version").read_text()
BATCHES, STREAM = "again_batches", "again_stream"


def _write(group: str, batch: KafkaBatch) -> None:
    while batch.is_rerun and (ROOT / "closed").exists():
        time.sleep(0.1)
    for range_ in batch.offset_ranges:
        records = [(message.value() or b"").decode() for message in batch.messages(range_)]
        (ROOT / group / range_.key).write_text("\n".join([VERSION, *records]))


@dg.asset(name=f"{BATCHES}_orders")
def batches_orders(again: KafkaBatch) -> None:
    """The location has another per-batch job, so this one has another `batch_key`."""
    _write(BATCHES, again)


@dg.asset(name=f"{STREAM}_orders")
def stream_orders(kafka_batch: KafkaBatch) -> None:
    _write(STREAM, kafka_batch)


def _kafka(group: str) -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
        group_id=group,
        topics=[group],
        record_every_s=1.0,
        records_per_minute=6_000.0,
        max_wait_s=0,
    )


defs = dg.Definitions.merge(
    build_kafka_batch_defs(
        kafka=_kafka(BATCHES),
        assets=[batches_orders],
        name=BATCHES,
        kafka_key="again_batches_kafka",
        batch_key="again",
    ),
    build_kafka_stream_defs(
        kafka=_kafka(STREAM),
        assets=[stream_orders],
        name=STREAM,
        version=VERSION,
        kafka_key="again_stream_kafka",
    ),
)
