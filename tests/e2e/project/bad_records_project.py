"""The groups of the test of bad records: one of each form of run, with the records of one topic.

The output of a range is a file with its good records. While `hold` exists, a run that has set
records aside writes its process id into the file `at_work`, and waits. Once `mended` exists, no
record is bad, and a replay waits after it has written its files.
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

ROOT = Path(os.environ["E2E_ROOT"])
BATCHES, STREAM = "bad_batches", "bad_stream"


def _process(group: str, batch: KafkaBatch) -> dg.MaterializeResult:  # type: ignore[type-arg]
    folder, set_aside = ROOT / group, 0
    is_mended = (ROOT / f"{group}_mended").exists()
    good: dict[str, list[str]] = {range_.key: [] for range_ in batch.offset_ranges}
    for range_ in batch.offset_ranges:
        for message in batch.messages(range_):
            value = (message.value() or b"").decode()
            if value.startswith("bad") and not is_mended:
                set_aside += batch.set_aside(message, ValueError(f"{value} is no number"))
            else:
                good[range_.key].append(value)
    if set_aside:
        _wait(group)
    for key, values in good.items():
        (folder / key).write_text("\n".join(values))
    if batch.is_rerun:
        _wait(group)
    return dg.MaterializeResult(metadata=batch.metadata())


def _wait(group: str) -> None:
    while (ROOT / f"{group}_hold").exists():
        (ROOT / f"{group}_at_work").write_text(str(os.getpid()))
        time.sleep(0.1)


@dg.asset(name=f"{BATCHES}_numbers")
def batches_numbers(bad_batch: KafkaBatch) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """The location has other per-batch jobs, so this one has another `batch_key`."""
    return _process(BATCHES, bad_batch)


@dg.asset(name=f"{STREAM}_numbers")
def stream_numbers(kafka_batch: KafkaBatch) -> dg.MaterializeResult:  # type: ignore[type-arg]
    return _process(STREAM, kafka_batch)


def _kafka(group: str) -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
        group_id=group,
        topics=["bad"],
        dead_letter_topic=f"{group}-dead",
        max_dead_letters="50%",
        heartbeat_timeout_s=24.0,
        record_every_s=1.0,
        records_per_minute=6_000.0,
        retry_delay_s=1.0,
        max_wait_s=0,
    )


defs = dg.Definitions.merge(
    build_kafka_batch_defs(
        kafka=_kafka(BATCHES),
        assets=[batches_numbers],
        name=BATCHES,
        kafka_key="bad_batches_kafka",
        batch_key="bad_batch",
    ),
    build_kafka_stream_defs(
        kafka=_kafka(STREAM),
        assets=[stream_numbers],
        name=STREAM,
        version=(ROOT / "version").read_text(),
        kafka_key="bad_stream_kafka",
    ),
)
