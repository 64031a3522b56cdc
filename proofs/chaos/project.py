"""This code location of `python -m proofs chaos` has one group and an asset that copies records.

The asset copies each record of its batch into a file of its range. Every code location that loads
it is a member. Files from outside decide what a run suffers: whether it fails or is killed.
"""

import csv
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from confluent_kafka import Consumer, TopicPartition

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    KafkaSparkResource,
    build_kafka_batch_defs,
)
from dagster_rebalance.core.partition import OffsetRange
from dagster_rebalance.spark.output import RANGE_KEY, write_parquet_by_range
from proofs.chaos.exchange import (
    BROKERS_VARIABLE,
    FLEETING,
    FOLDER_VARIABLE,
    GROUP,
    PROTOCOL_VARIABLE,
    ROLE_VARIABLE,
    SESSION_TIMEOUT_S,
    SPARK_VARIABLE,
    TOPIC,
    Exchange,
)

EXCHANGE = Exchange(Path(os.environ[FOLDER_VARIABLE]))
LONGEST_WORK_S = 9.0
LONGEST_CUT_OFF_S = 60.0
READ_LIMIT_S = 60.0


@contextmanager
def at_work(run_id: str) -> Iterator[None]:
    """Show that a run works, for somewhat longer than it would take.

    Only then can a fault meet the run.
    """
    with EXCHANGE.at_work(run_id):
        yield
        time.sleep(random.uniform(0, LONGEST_WORK_S))  # noqa: S311 - no secret
        deadline_at = time.monotonic() + LONGEST_CUT_OFF_S
        while EXCHANGE.is_cut_off(run_id) and time.monotonic() < deadline_at:
            time.sleep(0.2)


def numbers(range_: OffsetRange) -> Iterator[tuple[int, int]]:
    """The offset and the number of each record of a range."""
    settings = {
        "bootstrap.servers": os.environ[BROKERS_VARIABLE],
        "group.id": f"{GROUP}-reader",
        "enable.auto.commit": False,
    }
    consumer = Consumer({**settings, "log_level": 0})
    try:
        consumer.assign([TopicPartition(range_.topic, range_.partition, range_.start)])
        offset, deadline_at = range_.start, time.monotonic() + READ_LIMIT_S
        while offset < range_.until:
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                offset = int(message.offset() or 0) + 1
                yield offset - 1, json.loads(message.value() or b"{}")["number"]
            elif time.monotonic() > deadline_at:
                problem = f"{range_} could not be read to its end within {READ_LIMIT_S:g} s"
                raise TimeoutError(problem)
    finally:
        consumer.close()


@dg.asset(name="copied")
def copied_by_hand(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
    """Each record in the file of its range."""
    with at_work(context.run.run_id):
        for range_ in kafka_batch.offset_ranges:
            part = EXCHANGE.output / f"{range_.key}.{context.run.run_id}"
            with part.open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerows(
                    (number, range_.partition, offset, range_.start, range_.until)
                    for offset, number in numbers(range_)
                )
            part.replace(EXCHANGE.output / f"{range_.key}.csv")


@dg.asset(name="copied")
def copied_by_spark(
    context: dg.AssetExecutionContext, kafka_batch: KafkaBatch, spark: KafkaSparkResource
) -> None:
    """The same, read and written by Spark."""
    with at_work(context.run.run_id):
        number = "from_json(string(value), 'number BIGINT').number AS number"
        write_parquet_by_range(
            kafka_batch.dataframe(spark).selectExpr(*RANGE_KEY, "offset", number),
            str(EXCHANGE.output),
        )


@dg.asset
def passed_on(fleeting_batch: KafkaBatch) -> None:
    """The numbers of each range of the second group, in a file of their own."""
    for range_ in fleeting_batch.offset_ranges:
        part = EXCHANGE.fleeting / f"{range_.key}.part"
        part.write_text("\n".join(str(number) for _, number in numbers(range_)))
        part.replace(part.with_suffix(".txt"))


@dg.asset(deps=["copied"])
def noted(kafka_batch: KafkaBatch) -> None:
    """An empty file for each range: a success of the first asset alone must not commit it.

    Fails if that is wanted.
    """
    EXCHANGE.fail_if_wanted()
    for range_ in kafka_batch.offset_ranges:
        (EXCHANGE.noted / range_.key).touch()


PROTOCOL = os.environ[PROTOCOL_VARIABLE]
CLASSIC: dict[str, Any] = {
    "group_protocol": "classic",
    "client_config": {
        "session.timeout.ms": str(1000 * SESSION_TIMEOUT_S),
        "heartbeat.interval.ms": "1000",
    },
}
WITH_SPARK: dict[str, Any] = (
    {"spark": KafkaSparkResource(remote=dg.EnvVar(SPARK_VARIABLE))}
    if SPARK_VARIABLE in os.environ
    else {}
)

BOTH: dict[str, Any] = {
    "bootstrap_servers": dg.EnvVar(BROKERS_VARIABLE),
    "max_attempts": 10,  # runs fail here because of faults, never because of a record
    "retry_delay_s": 1.0,  # a longer configured wait would count as standing still
    "retry_delay_limit_s": 1.0,
    "heartbeat_timeout_s": 20.0,
    "start_timeout_s": 45.0,  # a killed daemon leaves behind the run that it was just launching
    **(CLASSIC if PROTOCOL == "classic" else {}),
}
kafka = KafkaConsumerResource(
    group_id=GROUP,
    topics=[TOPIC],
    max_ranges_per_run=2,
    max_runs_in_flight=50,  # Dagster's queue limits the runs, so no partition waits for a turn
    hold_limit_s=60.0,
    lease_s=40.0,
    shutdown_timeout_s=60.0,
    **BOTH,
)
if os.environ.get(ROLE_VARIABLE) == FLEETING:
    defs = build_kafka_batch_defs(
        kafka=KafkaConsumerResource(group_id=FLEETING, topics=[FLEETING], lease_s=20.0, **BOTH),
        assets=[passed_on],
        name="fleeting_batches",
        batch_key="fleeting_batch",
    )
else:
    copied = copied_by_spark if WITH_SPARK else copied_by_hand
    defs = build_kafka_batch_defs(kafka=kafka, assets=[copied, noted], **WITH_SPARK)
