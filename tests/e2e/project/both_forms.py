"""A group of each form of run with one asset function, for the records of one topic."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)

ROOT = Path(os.environ["E2E_ROOT"])


def both_forms(
    topic: str,
    process: Callable[[str, KafkaBatch], Any],
    **settings: Any,  # noqa: ANN401 - those of KafkaConsumerResource
) -> dg.Definitions:
    """Build the groups `<topic>_batches` and `<topic>_stream`.

    `process` is called with the name of the group. The location has other per-batch jobs, so this
    one has another `batch_key`.
    """
    batches, stream, batch_key = f"{topic}_batches", f"{topic}_stream", f"{topic}_batch"

    @dg.asset(name=f"{batches}_numbers", required_resource_keys={batch_key})
    def batches_numbers(context: dg.AssetExecutionContext):  # type: ignore[no-untyped-def]  # noqa: ANN202 - as process
        return process(batches, getattr(context.resources, batch_key))

    @dg.asset(name=f"{stream}_numbers")
    def stream_numbers(kafka_batch: KafkaBatch):  # type: ignore[no-untyped-def]  # noqa: ANN202 - as process
        return process(stream, kafka_batch)

    def kafka(group: str) -> KafkaConsumerResource:
        return KafkaConsumerResource(
            bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
            group_id=group,
            topics=[topic],
            dead_letter_topic=f"{group}-dead",
            heartbeat_timeout_s=24.0,
            record_every_s=1.0,
            records_per_minute=6_000.0,
            max_wait_s=0,
            **settings,
        )

    return dg.Definitions.merge(
        build_kafka_batch_defs(
            kafka=kafka(batches),
            assets=[batches_numbers],
            name=batches,
            kafka_key=f"{batches}_kafka",
            batch_key=batch_key,
        ),
        build_kafka_stream_defs(
            kafka=kafka(stream),
            assets=[stream_numbers],
            name=stream,
            version=(ROOT / "version").read_text(),
            kafka_key=f"{stream}_kafka",
        ),
    )
