"""`readers` and `help`: reading beside the bare client, and the start of the command line.

`poll_overhead` compares polls whose clients have the same settings. The clocks start with the first
records, without joining and connecting.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer

from dagster_rebalance import KafkaConsumerResource, OffsetRange
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.orchestration.batch.arrow_records import record_batches
from dagster_rebalance.testing.fixtures import unique_name
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.poll import BATCH, FAST, PARTITIONS, RECORD, config, produce, speed

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.testing.broker import KafkaCluster

    _Reader = Callable[[str, int], float]

_TOPIC = "readers"
_PAIRS_IN_A_RUN = 3
_HELP = (sys.executable, "-m", "dagster_rebalance.cli", "--help")
_HELPS_IN_A_RUN = 5


def measure(
    kafka: KafkaCluster, *, runs: int, records: int, step: Callable[[str], None]
) -> list[Entry]:
    """Read the whole topic with each pair of readers in turn."""
    step(f"readers, producing {records:,} records")
    kafka.create_topic(_TOPIC, PARTITIONS)
    produce(kafka.bootstrap_servers, _TOPIC, records)
    _messages(kafka.bootstrap_servers, records)  # warms the caches of the broker up
    size = f"{len(RECORD)} bytes"
    rows: list[tuple[str, str, float, _Reader, _Reader]] = [
        (
            "poll_defaults",
            f"poll(max_records={BATCH}) against consume({BATCH}), default settings, {size}",
            1.0,
            _poll,
            _consume,
        ),
        (
            "iteration",
            f"iteration over the consumer against Consumer.poll one by one, {size}",
            0.6,
            _iterate,
            _poll_one_by_one,
        ),
        (
            "arrow",
            f"arrow() against messages(), whose parts are read one by one, {size}",
            0.7,
            _arrow,
            _parts_of_messages,
        ),
        (
            "arrow",
            f"arrow() against messages(), which are only counted, {size}",
            0.7,
            _arrow,
            _messages,
        ),
    ]
    entries = []
    for name, case, bound, ours, peer in rows:
        step(f"readers, {name}")
        samples = []
        for turn in range(runs * _PAIRS_IN_A_RUN):
            readers = [ours, peer] if turn % 2 else [peer, ours]
            speeds = {read: read(kafka.bootstrap_servers, records) for read in readers}
            samples.append(Sample(speeds[ours], speeds[peer], speeds[ours] / speeds[peer]))
        entries.append(Entry(name, case, "records/s", "records/s", Goal(">=", bound), samples))
    return entries


def measure_help(*, runs: int, step: Callable[[str], None]) -> list[Entry]:
    """Measure the CPU of `dagster-rebalance --help`."""
    step("help")
    samples = []
    for _ in range(runs * _HELPS_IN_A_RUN):
        before = _cpu_of_children_s()
        subprocess.run(_HELP, stdout=subprocess.DEVNULL, check=True)  # noqa: S603 - this package
        used_s = _cpu_of_children_s() - before
        samples.append(Sample(used_s, None, used_s))
    return [Entry("help", "dagster-rebalance --help", "CPU", "s of CPU", Goal("<=", 0.4), samples)]


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _poll(servers: str, records: int) -> float:
    with RebalanceAwareConsumer(config(servers)) as consumer:
        consumer.subscribe([_TOPIC])
        return speed(lambda: len(consumer.poll(1.0, max_records=BATCH)), records)


def _consume(servers: str, records: int) -> float:
    with closing(Consumer(config(servers))) as consumer:
        consumer.subscribe([_TOPIC])
        return speed(lambda: len(consumer.consume(BATCH, 1.0)), records)


def _iterate(servers: str, records: int) -> float:
    with RebalanceAwareConsumer({**config(servers), **FAST}) as consumer:
        consumer.subscribe([_TOPIC])
        next(consumer)
        began_at = time.perf_counter()
        for count, _ in enumerate(consumer, 2):
            if count == records:
                break
        return (records - 1) / (time.perf_counter() - began_at)


def _poll_one_by_one(servers: str, records: int) -> float:
    with closing(Consumer({**config(servers), **FAST})) as consumer:
        consumer.subscribe([_TOPIC])

        def read() -> int:
            message = consumer.poll(1.0)
            return int(message is not None and message.error() is None)

        return speed(read, records)


def _reading(servers: str, records: int, count: Callable[[Any, list[OffsetRange]], int]) -> float:
    """Return the rate of a reader of exact ranges."""
    kafka = KafkaConsumerResource(
        bootstrap_servers=servers, group_id=unique_name(_TOPIC), topics=[_TOPIC]
    )
    each = records // PARTITIONS
    ranges = [OffsetRange(_TOPIC, number, 0, each) for number in range(PARTITIONS)]
    with closing(kafka.reader()) as reader:
        # Connects, and imports pyarrow.
        first = [OffsetRange(_TOPIC, 0, 0, 1)]
        sum(batch.num_rows for batch in record_batches(reader.read_lists(first), first))
        began_at = time.perf_counter()
        return count(reader, ranges) / (time.perf_counter() - began_at)


def _arrow(servers: str, records: int) -> float:
    return _reading(
        servers,
        records,
        lambda reader, ranges: sum(
            batch.num_rows for batch in record_batches(reader.read_lists(ranges), ranges)
        ),
    )


def _messages(servers: str, records: int) -> float:
    return _reading(servers, records, lambda reader, ranges: sum(1 for _ in reader.read(ranges)))


def _parts_of_messages(servers: str, records: int) -> float:

    def count(reader: Any, ranges: list[OffsetRange]) -> int:  # noqa: ANN401 - a RangeReader
        number = 0
        for message in reader.read(ranges):
            number += 1
            message.key()
            message.value()
            message.topic()
            message.partition()
            message.offset()
            message.timestamp()
            message.headers()
        return number

    return _reading(servers, records, count)
