"""The groups of the test of bisection: one of each form of run, with the records of one topic.

An attempt writes its output, and then raises if it has a bad record. It appends its process id and
its ranges to the file `calls`. While the file `hold` exists, an attempt on a part of a range waits.
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
from dagster_rebalance.arrow.output import write_parquet_by_range

ROOT = Path(os.environ["E2E_ROOT"])
BATCHES, STREAM = "raising_batches", "raising_stream"


def _process(group: str, batch: KafkaBatch) -> None:
    folder = ROOT / group
    written = write_parquet_by_range(batch.arrow(), str(folder / "output"))
    with (folder / "calls").open("a") as calls:
        calls.write(f"{os.getpid()} {' '.join(one.key for one in batch.offset_ranges)}\n")
    while batch.failed_ranges and (folder / "hold").exists():
        time.sleep(0.1)
    values = [(message.value() or b"").decode() for message in batch.messages()]
    assert len(values) == written
    for value in values:
        if value.startswith("bad"):
            message = f"{value} is no number"
            raise ValueError(message)


@dg.asset(name=f"{BATCHES}_numbers")
def batches_numbers(raising_batch: KafkaBatch) -> None:
    """The location has other per-batch jobs, so this one has another `batch_key`."""
    _process(BATCHES, raising_batch)


@dg.asset(name=f"{STREAM}_numbers")
def stream_numbers(kafka_batch: KafkaBatch) -> None:
    _process(STREAM, kafka_batch)


def _kafka(group: str) -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
        group_id=group,
        topics=["raising"],
        on_failure="bisect",
        dead_letter_topic=f"{group}-dead",
        max_dead_letters="100",
        max_attempts=2,
        heartbeat_timeout_s=24.0,
        record_every_s=1.0,
        records_per_minute=6_000.0,
        retry_delay_s=0.5,
        retry_delay_limit_s=5.0,
        max_wait_s=0,
    )


defs = dg.Definitions.merge(
    build_kafka_batch_defs(
        kafka=_kafka(BATCHES),
        assets=[batches_numbers],
        name=BATCHES,
        kafka_key="raising_batches_kafka",
        batch_key="raising_batch",
    ),
    build_kafka_stream_defs(
        kafka=_kafka(STREAM),
        assets=[stream_numbers],
        name=STREAM,
        version=(ROOT / "version").read_text(),
        kafka_key="raising_stream_kafka",
    ),
)
