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


def _asset(group: str) -> dg.AssetsDefinition:
    @dg.asset(name=f"{group}_orders")
    def orders(again: KafkaBatch) -> None:
        while again.is_rerun and (ROOT / "closed").exists():
            time.sleep(0.1)
        for range_ in again.offset_ranges:
            records = [(message.value() or b"").decode() for message in again.messages(range_)]
            (ROOT / group / range_.key).write_text("\n".join([VERSION, *records]))

    return orders


def _kafka(group: str) -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
        group_id=group,
        topics=[group],
        record_every_s=1.0,
        max_wait_s=0,
    )


BATCHES, STREAM = "again_batches", "again_stream"
defs = dg.Definitions.merge(
    build_kafka_batch_defs(
        kafka=_kafka(BATCHES),
        assets=[_asset(BATCHES)],
        name=BATCHES,
        kafka_key="again_batches_kafka",
        batch_key="again",
    ),
    build_kafka_stream_defs(
        kafka=_kafka(STREAM),
        assets=[_asset(STREAM)],
        name=STREAM,
        version=VERSION,
        kafka_key="again_stream_kafka",
        batch_key="again",
    ),
)
