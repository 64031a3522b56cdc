"""The code location of `python -m proofs chaos`: an asset copies records into a file per range.

Each code location, or each streaming run, is a member. Files of the exchange decide which runs fail
or are killed.
"""

import csv
import json
import logging
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
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
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.orchestration.definitions import build_kafka_stream_defs
from dagster_rebalance.spark.output import RANGE_KEY
from proofs.chaos.exchange import (
    BROKERS_VARIABLE,
    DATABASE_VARIABLE,
    FLEETING,
    FOLDER_VARIABLE,
    GROUP,
    HEARTBEAT_TIMEOUT_S,
    JOB,
    PARTITIONS_VARIABLE,
    PROTOCOL_VARIABLE,
    ROLE_VARIABLE,
    RUNS,
    SESSION_TIMEOUT_S,
    SINK_VARIABLE,
    SPARK_VARIABLE,
    STREAMING,
    TOPIC,
    Exchange,
)
from proofs.chaos.journal import Journal
from proofs.chaos.sinks import Sink, numbered

EXCHANGE = Exchange(Path(os.environ[FOLDER_VARIABLE]))
ROLE = os.environ.get(ROLE_VARIABLE)
SINK = Sink(os.environ.get(SINK_VARIABLE, Sink.PARQUET.value))
# The log of a member explains a stall; the ticks that show it may not come.
_MEMBER_LOG = logging.StreamHandler()
_MEMBER_LOG.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
_LOGGER = logging.getLogger("dagster_rebalance")
_LOGGER.addHandler(_MEMBER_LOG)
_LOGGER.setLevel(logging.INFO)
_LOGGER.propagate = False
LONGEST_WORK_S = 9.0
LONGEST_STREAMED_WORK_S = 4.0
LONGEST_CUT_OFF_S = 60.0
READ_LIMIT_S = 60.0


@cache
def journal(run_id: str) -> Journal:
    """Return the journal of this run, and register its process."""
    if ROLE == STREAMING:
        EXCHANGE.show_process(run_id)
    return Journal(EXCHANGE.bodies / run_id)


@contextmanager
def step(run_id: str, batch: KafkaBatch, *, is_last: bool) -> Iterator[None]:
    """Write an event of an asset to the journal."""
    keys = [range_.key for range_ in batch.offset_ranges]
    with journal(run_id).step(batch.batch_id, keys, is_last=is_last):
        yield


@contextmanager
def at_work(run_id: str) -> Iterator[None]:
    """Register a run as working, longer than its work takes, to let faults hit it.

    A streaming run is also registered between its batches.
    """
    with nullcontext() if ROLE == STREAMING else EXCHANGE.at_work(run_id):
        yield
        chance = random.random()  # noqa: S311 - no secret
        # Most batches of a streaming run are short: many of them overlap in time.
        work_s = (
            chance**4 * LONGEST_STREAMED_WORK_S if ROLE == STREAMING else chance * LONGEST_WORK_S
        )
        time.sleep(work_s)
        deadline_at = time.monotonic() + LONGEST_CUT_OFF_S
        while EXCHANGE.is_cut_off(run_id) and time.monotonic() < deadline_at:
            time.sleep(0.2)


@contextmanager
def reader() -> Iterator[Consumer]:
    """Open a consumer for all ranges of a batch: one for each of many takes seconds.

    A request waits for the one of the earlier range, which finds no more records.
    """
    settings = {
        "bootstrap.servers": os.environ[BROKERS_VARIABLE],
        "group.id": f"{GROUP}-reader",
        "enable.auto.commit": False,
        "fetch.wait.max.ms": 10,
    }
    consumer = Consumer({**settings, "log_level": 0})
    try:
        yield consumer
    finally:
        consumer.close()


def numbers(consumer: Consumer, range_: OffsetRange) -> Iterator[tuple[int, int]]:
    """Yield the offset and the number of each record of a range."""
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


@dg.asset(name="copied")
def copied_by_hand(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
    """Copy the records with plain Python, into a file per range."""
    run_id = context.run.run_id
    with step(run_id, kafka_batch, is_last=False), at_work(run_id), reader() as consumer:
        for range_ in kafka_batch.offset_ranges:
            part = EXCHANGE.output / f"{range_.key}.{context.run.run_id}"
            with part.open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerows(
                    (number, range_.partition, offset, range_.start, range_.until)
                    for offset, number in numbers(consumer, range_)
                )
            part.replace(EXCHANGE.output / f"{range_.key}.csv")


@dg.asset(name="copied")
def copied_by_spark(
    context: dg.AssetExecutionContext, kafka_batch: KafkaBatch, spark: KafkaSparkResource
) -> None:
    """Copy the records with Spark."""
    run_id = context.run.run_id
    with step(run_id, kafka_batch, is_last=False), at_work(run_id):
        number = "from_json(string(value), 'number BIGINT').number AS number"
        frame = kafka_batch.dataframe(spark).selectExpr(*RANGE_KEY, "offset", number)
        SINK.write(frame, EXCHANGE.output, kafka_batch.offset_ranges)


@dg.asset(name="copied")
def copied_by_arrow(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
    """Copy the records from Arrow, without Spark."""
    run_id = context.run.run_id
    with step(run_id, kafka_batch, is_last=False), at_work(run_id):
        records = numbered(kafka_batch.arrow())
        database = os.environ.get(DATABASE_VARIABLE, "")
        SINK.write_arrow(records, EXCHANGE.output, kafka_batch.offset_ranges, database)


@dg.asset
def passed_on(fleeting_batch: KafkaBatch) -> None:
    """Write the numbers of each range of the second group into a file."""
    with reader() as consumer:
        for range_ in fleeting_batch.offset_ranges:
            part = EXCHANGE.fleeting / f"{range_.key}.part"
            read = numbers(consumer, range_)
            part.write_text("\n".join(str(number) for _, number in read))
            part.replace(part.with_suffix(".txt"))


@dg.asset(deps=["copied"])
def noted(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
    """Write an empty file per range: a success of the first asset alone must not commit.

    Fails on request.
    """
    with step(context.run.run_id, kafka_batch, is_last=True):
        EXCHANGE.fail_if_wanted()
        for range_ in kafka_batch.offset_ranges:
            (EXCHANGE.noted / range_.key).touch()


PROTOCOL = os.environ[PROTOCOL_VARIABLE]
PARTITIONS = int(os.environ.get(PARTITIONS_VARIABLE, "0"))
MOST_RUNS = 25
"""Runs at the same time that two cores can launch, with hundreds of partitions."""
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
    "max_wait_s": 0,  # nor do records wait for company
    "retry_delay_s": 0.5,  # a longer configured wait would count as standing still
    "retry_delay_limit_s": 0.5,
    "heartbeat_timeout_s": float(HEARTBEAT_TIMEOUT_S),
    "start_timeout_s": 45.0,  # a killed daemon leaves behind the run that it was just launching
    **(CLASSIC if PROTOCOL == "classic" else {}),
}
kafka = KafkaConsumerResource(
    group_id=GROUP,
    topics=[TOPIC],
    max_ranges_per_run=max(2, PARTITIONS // MOST_RUNS),
    max_runs_in_flight=50,  # Dagster's queue limits the runs, so no partition waits for a turn
    hold_limit_s=60.0,
    lease_s=40.0,
    shutdown_timeout_s=60.0,
    # The witness reads the progress from Dagster.
    record_every_s=10.0 if ROLE == STREAMING else None,
    records_per_minute=6_000.0,
    **BOTH,
)
copied = copied_by_spark if WITH_SPARK else copied_by_hand
if SINK.is_of_arrow:
    copied = copied_by_arrow
if ROLE == FLEETING:
    defs = build_kafka_batch_defs(
        kafka=KafkaConsumerResource(group_id=FLEETING, topics=[FLEETING], lease_s=20.0, **BOTH),
        assets=[passed_on],
        name="fleeting_batches",
        batch_key="fleeting_batch",
    )
elif ROLE == STREAMING:
    defs = build_kafka_stream_defs(
        kafka=kafka,
        assets=[copied, noted],
        runs=RUNS,
        name=JOB,
        version=EXCHANGE.version,
        **WITH_SPARK,
    )
else:
    defs = build_kafka_batch_defs(kafka=kafka, assets=[copied, noted], name=JOB, **WITH_SPARK)
