"""`arrow_parquet`: a backlog from Kafka to Parquet through Arrow, beside a plain loop by hand.

A streaming run and the loop take turns at one topic, with batches of the same size. The loop is one
process with one consumer. It converts columns, not records, writes a file per batch and commits.
Both keep the columns of `COLUMNS`. Rates count from end to end of batches.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from confluent_kafka import Consumer, Message, Producer
from pyarrow import parquet

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.poll import FAST
from proofs.bench.stream_spark import ends_of, records_per_second
from proofs.bench.streams import (
    PARQUET,
    STREAM,
    Body,
    committed_ranges,
    committed_records,
    streaming_run,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.testing.broker import KafkaCluster

PARTITIONS = 8
RECORD_BYTES = 200
PAD = b"x" * (RECORD_BYTES - 9)
_CONSUMED = 10_000
_LIMIT_S = 900.0
_WARM_UP = 1
"""Unmeasured rounds, in which the broker compiles its code and caches the topic."""


@dataclass(frozen=True)
class _Backlog:
    """The backlog that both contenders process from its beginning."""

    kafka: KafkaCluster
    topic: str
    records: int
    size: int


def measure(
    kafka: KafkaCluster, *, runs: int, records: int, batches: int, step: Callable[[str], None]
) -> list[Entry]:
    """Process the backlog with both, in turn."""
    each = records // batches // PARTITIONS
    backlog = _Backlog(kafka, unique_name("arrow"), each * batches * PARTITIONS, each * PARTITIONS)
    step(f"arrow_parquet, producing {backlog.records:,} records")
    produce(kafka, backlog.topic, backlog.records)
    samples = []
    for run in range(1 - _WARM_UP, 1 + runs):
        step("arrow_parquet, " + (f"run {run} of {runs}" if run > 0 else "warming up"))
        turn = [_stream, _plain] if run % 2 else [_plain, _stream]
        rates = {form: records_per_second(form(backlog)) for form in turn}
        if run > 0:
            ours, peer = rates[_stream], rates[_plain]
            samples.append(Sample(ours, peer, ours / peer))
    case = (
        f"{backlog.records:,} records of {RECORD_BYTES} bytes to Parquet in batches of "
        f"{backlog.size:,}, against a loop by hand"
    )
    return [
        Entry("arrow_parquet", case, "the loop's figure", "records/s", Goal(">=", 0.9), samples)
    ]


def produce(kafka: KafkaCluster, topic: str, records: int) -> None:
    """Create a topic with different records of 200 bytes, in turn in each partition.

    Raises:
        BrokerError: Kafka did not confirm them in time.
    """
    kafka.create_topic(topic, PARTITIONS)
    producer = Producer(
        {
            **kafka.client_config(),
            "linger.ms": 50,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    for number in range(records):
        value = b"%09d" % number + PAD
        while True:
            try:
                producer.produce(topic, value, partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(_LIMIT_S):
        msg = f"Kafka did not take {records:,} records within {_LIMIT_S:g} s"
        raise BrokerError(msg)


def _stream(backlog: _Backlog) -> list[tuple[float, int]]:
    """Process the backlog with a streaming run."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        body = Body(
            backlog.kafka.bootstrap_servers,
            backlog.topic,
            PARTITIONS,
            unique_name("arrow"),
            output=f"{folder}/out",
            records_per_range=backlog.size // PARTITIONS,
            from_start=True,
            sink=PARQUET,
        )
        with streaming_run(backlog.kafka, Path(folder) / "home", body):
            wait_until(
                lambda: (committed_records(backlog.kafka, body, STREAM) or 0) >= backlog.records,
                timeout_s=_LIMIT_S,
                what=f"{backlog.records:,} records to be committed by {body.group}-{STREAM}",
                interval_s=1.0,
            )
        return ends_of(committed_ranges(backlog.kafka, f"{body.group}-{STREAM}"))


def _plain(backlog: _Backlog) -> list[tuple[float, int]]:
    """Process the backlog with a loop."""
    settings = {
        **backlog.kafka.client_config(),
        **FAST,
        "group.id": unique_name("plain"),
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    ends: list[tuple[float, int]] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        closing(Consumer(settings)) as consumer,
    ):
        consumer.subscribe([backlog.topic])
        while sum(records for _, records in ends) < backlog.records:
            lists: list[list[Message]] = []
            missing = backlog.size
            while missing:
                lists.append(consumer.consume(min(_CONSUMED, missing), 1.0))
                missing -= len(lists[-1])
            _write(lists, Path(folder) / f"{len(ends)}.parquet")
            consumer.commit(asynchronous=False)
            ends.append((time.time(), backlog.size))
    return ends


def _write(lists: list[list[Message]], file: Path) -> None:
    """Write messages to a file, which appears as a whole."""
    kinds = {
        "topic": (Message.topic, pa.string()),
        "partition": (Message.partition, pa.int32()),
        "offset": (Message.offset, pa.int64()),
        "value": (Message.value, pa.binary()),
    }
    columns = {
        name: pa.array(list(chain.from_iterable(map(get, one) for one in lists)), type_)
        for name, (get, type_) in kinds.items()
    }
    staged = file.with_suffix(".staged")
    parquet.write_table(pa.table(columns), staged)
    staged.replace(file)
