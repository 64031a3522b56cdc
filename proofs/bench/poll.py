"""`poll_overhead`: `poll(max_records=500)` beside the bare client's `consume(500)`.

The clock starts with the first records, without joining and connecting.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeAlias

from confluent_kafka import Consumer, Message, Producer

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.testing.fixtures import unique_name
from proofs.bench.entries import Entry, Goal, Sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.testing.broker import KafkaCluster

_Reader: TypeAlias = "Callable[[str, int], float]"

_TOPIC = "poll-overhead"
PARTITIONS, RECORD, BATCH = 4, b"x" * 100, 500
FAST = {"fetch.queue.backoff.ms": 5}
"""By default the bare client rests for a second whenever its queue is full, and would be measured
resting."""
_LIMIT_S = 120.0
_PAIRS_IN_A_RUN = 3
"""Reads per run: a read takes a second, in which a machine may be busy."""


def measure(
    kafka: KafkaCluster, *, runs: int, records: int, step: Callable[[str], None]
) -> list[Entry]:
    """Read the whole topic with each client in turn."""
    step(f"poll_overhead, producing {records:,} records")
    kafka.create_topic(_TOPIC, PARTITIONS)
    produce(kafka.bootstrap_servers, _TOPIC, records)
    # The broker's caches and its compiler are warm from here on.
    _bare(kafka.bootstrap_servers, records)
    readers = [_ours, _bare, _careful]
    against: dict[_Reader, list[Sample]] = {_bare: [], _careful: []}
    for run in range(runs * _PAIRS_IN_A_RUN):
        if run % _PAIRS_IN_A_RUN == 0:
            step(f"poll_overhead, run {run // _PAIRS_IN_A_RUN + 1} of {runs}")
        readers.append(readers.pop(0))
        speeds: dict[_Reader, float] = {
            read: read(kafka.bootstrap_servers, records) for read in readers
        }
        for peer, samples in against.items():
            samples.append(Sample(speeds[_ours], speeds[peer], speeds[_ours] / speeds[peer]))
    case = f"poll(max_records={BATCH}) against Consumer.consume({BATCH}), {len(RECORD)} bytes"
    cases: dict[_Reader, str] = {
        _bare: case,
        _careful: f"{case}, with the look for errors that poll makes and its users must make",
    }
    return [
        Entry("poll_overhead", cases[peer], "records/s", "records/s", Goal(">=", 0.95), samples)
        for peer, samples in against.items()
    ]


def produce(servers: str, topic: str, records: int) -> None:
    """Fill a topic."""
    producer = Producer(
        {"bootstrap.servers": servers, "linger.ms": 50, "queue.buffering.max.messages": 1_000_000}
    )
    for number in range(records):
        while True:
            try:
                producer.produce(topic, RECORD, partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(_LIMIT_S):
        msg = f"Kafka did not take {records:,} records within {_LIMIT_S:g} s"
        raise BrokerError(msg)


def config(servers: str) -> dict[str, Any]:
    """Return the settings of a consumer in a group of its own."""
    return {
        "bootstrap.servers": servers,
        "group.id": unique_name("poll-overhead"),
        "group.protocol": "consumer",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }


def _ours(servers: str, records: int) -> float:
    with RebalanceAwareConsumer({**config(servers), **FAST}) as consumer:
        consumer.subscribe([_TOPIC])
        return speed(lambda: len(consumer.poll(1.0, max_records=BATCH)), records)


def _bare(servers: str, records: int) -> float:
    with closing(Consumer({**config(servers), **FAST})) as consumer:
        consumer.subscribe([_TOPIC])
        return speed(lambda: len(consumer.consume(BATCH, 1.0)), records)


def _careful(servers: str, records: int) -> float:
    with closing(Consumer({**config(servers), **FAST})) as consumer:
        consumer.subscribe([_TOPIC])

        def read() -> int:
            batch = consumer.consume(BATCH, 1.0)
            if any(map(Message.error, batch)):
                batch = [message for message in batch if not message.error()]
            return len(batch)

        return speed(read, records)


def speed(read: Callable[[], int], records: int) -> float:
    """Return the rate of a reader, whose calls return numbers of records."""
    give_up_at = time.monotonic() + _LIMIT_S
    first = 0
    while not first:
        first = read()
        _check(give_up_at)
    began_at, count = time.perf_counter(), first
    while count < records:
        found = read()
        count += found
        if not found:
            _check(give_up_at)
    return (records - first) / (time.perf_counter() - began_at)


def _check(give_up_at: float) -> None:
    if time.monotonic() > give_up_at:
        msg = f"the records were not all there within {_LIMIT_S:g} s"
        raise BrokerError(msg)
