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
from confluent_kafka import Consumer, Message, TopicPartition

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    KafkaSparkResource,
    build_kafka_batch_defs,
)
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.orchestration.definitions import build_kafka_stream_defs
from dagster_rebalance.spark.output import RANGE_KEY
from proofs.chaos.bad import Bad, why_bad, why_bad_in_sql
from proofs.chaos.exchange import (
    BAD_VARIABLE,
    BROKERS_VARIABLE,
    DATABASE_VARIABLE,
    FLEETING,
    FOLDER_VARIABLE,
    GROUP,
    HEARTBEAT_TIMEOUT_S,
    JOB,
    LETTERS,
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
from proofs.chaos.sinks import Sink, numbered, with_texts

EXCHANGE = Exchange(Path(os.environ[FOLDER_VARIABLE]))
ROLE = os.environ.get(ROLE_VARIABLE)
BAD = Bad(os.environ[BAD_VARIABLE]) if BAD_VARIABLE in os.environ else None
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
LONGEST_PART_S = 1.0
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
    """Write an event of an asset to the journal. That of a replay is no work of the group."""
    if batch.is_rerun:
        yield
        return
    keys = [range_.key for range_ in batch.offset_ranges]
    with journal(run_id).step(batch.batch_id, keys, is_last=is_last):
        yield


@contextmanager
def at_work(run_id: str, batch: KafkaBatch) -> Iterator[None]:
    """Register a run as working, longer than its work takes, to let faults hit it.

    A streaming run is also registered between its batches.
    """
    is_streaming = ROLE == STREAMING and not batch.is_rerun
    with nullcontext() if is_streaming else EXCHANGE.at_work(run_id):
        yield
        chance = random.random()  # noqa: S311 - no secret
        # Most batches of a streaming run are short: many of them overlap in time.
        work_s = chance**4 * LONGEST_STREAMED_WORK_S if is_streaming else chance * LONGEST_WORK_S
        # A search has many parts.
        time.sleep(min(work_s, LONGEST_PART_S) if batch.failed_ranges else work_s)
        deadline_at = time.monotonic() + LONGEST_CUT_OFF_S
        while EXCHANGE.is_cut_off(run_id) and time.monotonic() < deadline_at:
            time.sleep(0.2)


@contextmanager
def copying(context: dg.AssetExecutionContext, batch: KafkaBatch) -> Iterator[None]:
    """Surround the work of the first asset, which is the only one with bisection."""
    run_id, is_last = context.run.run_id, BAD is Bad.BISECT
    with step(run_id, batch, is_last=is_last):
        with at_work(run_id, batch):
            yield
        if is_last:
            note(batch)


def note(batch: KafkaBatch) -> None:
    """Write an empty file per range. Fails on request."""
    EXCHANGE.fail_if_wanted()
    for range_ in batch.offset_ranges:
        (EXCHANGE.noted / range_.key).touch()


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


def messages(consumer: Consumer, range_: OffsetRange) -> Iterator[Message]:
    """Yield the records of a range."""
    consumer.assign([TopicPartition(range_.topic, range_.partition, range_.start)])
    offset, deadline_at = range_.start, time.monotonic() + READ_LIMIT_S
    while offset < range_.until:
        message = consumer.poll(1.0)
        if message is not None and message.error() is None:
            offset = int(message.offset() or 0) + 1
            yield message
        elif time.monotonic() > deadline_at:
            problem = f"{range_} could not be read to its end within {READ_LIMIT_S:g} s"
            raise TimeoutError(problem)


def number_in(message: Message) -> int:
    """Return the number of a record."""
    return int(json.loads(message.value() or b"{}")["number"])


def good_numbers(
    consumer: Consumer, batch: KafkaBatch, range_: OffsetRange
) -> Iterator[tuple[int, int]]:
    """Yield the offset and the number of each good record of a range.

    Raises:
        ValueError: A record is bad, and bisection has to find it.
    """
    for message in messages(consumer, range_):
        number = number_in(message)
        why = why_bad(number, is_mended=EXCHANGE.is_mended) if BAD else None
        if why is None:
            yield int(message.offset() or 0), number
        elif BAD is Bad.SET_ASIDE:
            batch.set_aside(message, why)
        else:
            raise ValueError(why)


@dg.asset(name="copied")
def copied_by_hand(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
    """Copy the records with plain Python, into a file per range.

    The file of a range with a record that raises is published, too: a part of the range deletes it.
    """
    with copying(context, kafka_batch), reader() as consumer:
        for range_ in kafka_batch.offset_ranges:
            part = EXCHANGE.output / f"{range_.key}.{context.run.run_id}"
            try:
                with part.open("w", newline="") as file:
                    rows = csv.writer(file)
                    for offset, number in good_numbers(consumer, kafka_batch, range_):
                        place = (range_.partition, offset, range_.start, range_.until)
                        rows.writerow((number, *place))
            finally:
                for failed in kafka_batch.failed_ranges:
                    (EXCHANGE.output / f"{failed.key}.csv").unlink(missing_ok=True)
                part.replace(EXCHANGE.output / f"{range_.key}.csv")


@dg.asset(name="copied")
def copied_by_spark(
    context: dg.AssetExecutionContext, kafka_batch: KafkaBatch, spark: KafkaSparkResource
) -> None:
    """Copy the records with Spark."""
    with copying(context, kafka_batch):
        number = "from_json(string(value), 'number BIGINT').number AS number"
        frame = kafka_batch.dataframe(spark).selectExpr(*RANGE_KEY, "offset", number)
        if BAD:
            why = why_bad_in_sql("number", is_mended=EXCHANGE.is_mended)
            frame = frame.selectExpr("*", f"{why} AS why")
        if BAD is Bad.SET_ASIDE:
            frame = kafka_batch.good_rows(frame, error="why")
        elif BAD is Bad.BISECT:
            number = "CASE WHEN why IS NULL THEN number ELSE bigint(raise_error(why)) END"
            frame = frame.selectExpr(*RANGE_KEY, "offset", f"{number} AS number")
        SINK.write(frame, EXCHANGE.output, kafka_batch.offset_ranges)


@dg.asset(name="copied")
def copied_by_arrow(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
    """Copy the records from Arrow, without Spark."""

    def good_rows(rows: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
        if BAD is None:
            return rows
        is_mended = EXCHANGE.is_mended
        whys = [why_bad(number, is_mended=is_mended) for number in rows["number"].to_pylist()]
        if BAD is Bad.SET_ASIDE:
            return kafka_batch.good_rows(with_texts(rows, "why", whys), error="why")
        for why in filter(None, whys):
            raise ValueError(why)
        return rows

    with copying(context, kafka_batch):
        records = numbered(kafka_batch.arrow(), good_rows)
        database = os.environ.get(DATABASE_VARIABLE, "")
        SINK.write_arrow(records, EXCHANGE.output, kafka_batch.offset_ranges, database)


@dg.asset
def passed_on(fleeting_batch: KafkaBatch) -> None:
    """Write the numbers of each range of the second group into a file."""
    with reader() as consumer:
        for range_ in fleeting_batch.offset_ranges:
            part = EXCHANGE.fleeting / f"{range_.key}.part"
            read = messages(consumer, range_)
            part.write_text("\n".join(str(number_in(message)) for message in read))
            part.replace(part.with_suffix(".txt"))


@dg.asset(deps=["copied"])
def noted(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
    """Note the ranges: a success of the first asset alone must not commit."""
    with step(context.run.run_id, kafka_batch, is_last=True):
        note(kafka_batch)


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
    **{**BOTH, **(BAD.settings if BAD else {})},
    dead_letter_topic=LETTERS if BAD else None,
    max_dead_letters="50%" if BAD else None,
)
copied = copied_by_spark if WITH_SPARK else copied_by_hand
if SINK.is_of_arrow:
    copied = copied_by_arrow
assets = [copied] if BAD is Bad.BISECT else [copied, noted]
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
        assets=assets,
        runs=RUNS,
        name=JOB,
        version=EXCHANGE.version,
        **WITH_SPARK,
    )
else:
    defs = build_kafka_batch_defs(kafka=kafka, assets=assets, name=JOB, **WITH_SPARK)
