"""`spark_ingest` and `write_by_range`: batches through Spark, beside plain Spark.

Both read the same topic through one warm Spark Connect server in turn, each time other records of
the same size.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer
from pyspark.sql.connect.session import SparkSession

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.spark.output import write_parquet_by_range
from dagster_rebalance.spark.ranges import read_ranges
from dagster_rebalance.testing.fixtures import unique_name
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.streams import BOUNDS, COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import DataFrame

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.spark_connect import SparkConnectServer

    _Write = Callable[[Sequence[OffsetRange], str], object]

_INGEST_PARTITIONS = 4
_WRITES = {(1, 1_000): 3, (4, 1_000): 3, (4, 60_000): 2, (64, 1_024): 1}
"""Ranges and records of a write, and writes per run."""
_WARM_UP = 2
_VALUE = json.dumps({"number": 12345, "cents": 995, "pad": "x" * 60}).encode()
_PRODUCE_LIMIT_S = 120.0


def measure_ingest(
    kafka: KafkaCluster,
    server: SparkConnectServer,
    *,
    runs: int,
    records: int,
    step: Callable[[str], None],
) -> list[Entry]:
    """Aggregate a topic, in turn through a batch and through Spark's connector."""
    step(f"spark_ingest, producing {records:,} records")
    each = records // _INGEST_PARTITIONS
    topic = fill(kafka, [each] * _INGEST_PARTITIONS)
    ranges = [OffsetRange(topic, number, 0, each) for number in range(_INGEST_PARTITIONS)]
    samples = []
    with connected(server) as session:

        def ours() -> float:
            return _took_s(lambda: _read_all(read_ranges(session, ranges, kafka.client_config())))

        def by_hand() -> float:
            return _took_s(lambda: _read_all(_by_hand(session, kafka, ranges)))

        for run in range(1 - _WARM_UP, 1 + runs):
            step(f"spark_ingest, run {run} of {runs}" if run > 0 else "spark_ingest, warming up")
            took_s = {read: read() for read in ((ours, by_hand) if run % 2 else (by_hand, ours))}
            mine, theirs = records / took_s[ours], records / took_s[by_hand]
            samples.append(Sample(mine, theirs, mine / theirs))
    case = f"{records:,} records through read_ranges against Spark's connector by hand"
    goal = Goal(">=", 0.95)
    return [Entry("spark_ingest", case, "records/s", "records/s", goal, samples[_WARM_UP:])]


def measure_writes(
    kafka: KafkaCluster,
    server: SparkConnectServer,
    *,
    runs: int,
    step: Callable[[str], None],
) -> list[Entry]:
    """Write micro-batches of several ranges, in turn by range and by a plain append."""
    sizes = [0] * max(count for count, _ in _WRITES)
    for (count, records), turns in _WRITES.items():
        for number in range(count):
            sizes[number] += 2 * (_WARM_UP + runs * turns) * records // count
    topic = fill(kafka, sizes)
    entries = []
    with connected(server) as session, tempfile.TemporaryDirectory(prefix="bench-") as folder:

        def by_range(ranges: Sequence[OffsetRange], name: str) -> None:
            frame = read_ranges(session, ranges, kafka.client_config())
            write_parquet_by_range(frame.selectExpr(*COLUMNS, *BOUNDS), name)

        def append(ranges: Sequence[OffsetRange], name: str) -> None:
            frame = read_ranges(session, ranges, kafka.client_config())
            frame.selectExpr(*COLUMNS, *BOUNDS).write.mode("append").parquet(name)

        positions = [0] * len(sizes)
        for (count, records), turns in _WRITES.items():
            case = f"{count} range{'s' if count > 1 else ''}, {records:,} records"
            step(f"write_by_range, {case}")
            samples = []
            for turn in range(_WARM_UP + runs * turns):
                writes = (by_range, append) if turn % 2 else (append, by_range)
                took_s: dict[_Write, float] = {}
                for write in writes:
                    ranges = _next(topic, positions, count, records)
                    name = str(Path(folder) / f"{write.__name__}-{count}-{records}")
                    began_at = time.perf_counter()
                    write(ranges, name)
                    took_s[write] = time.perf_counter() - began_at
                mine, theirs = took_s[by_range], took_s[append]
                samples.append(Sample(mine, theirs, mine / theirs))
            entries.append(
                Entry(
                    "write_by_range",
                    f"{case}, read and written by range, against a plain append of the same",
                    "time",
                    "s",
                    Goal("<=", 1.3),
                    samples[_WARM_UP:],
                )
            )
    return entries


def fill(kafka: KafkaCluster, sizes: Sequence[int], values: Sequence[bytes] = (_VALUE,)) -> str:
    """Create a topic with so many records in each partition, and return its name.

    The records have the values in turn.

    Raises:
        BrokerError: Kafka did not confirm them in time.
    """
    topic = unique_name("bench")
    kafka.create_topic(topic, len(sizes))
    producer = Producer(
        {
            **kafka.client_config(),
            "linger.ms": 50,
            "compression.type": "lz4",
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    for partition, size in enumerate(sizes):
        for value in islice(cycle(values), size):
            while True:
                try:
                    producer.produce(topic, value, partition=partition)
                    break
                except BufferError:
                    producer.poll(0.1)
    if producer.flush(_PRODUCE_LIMIT_S):
        msg = f"Kafka did not take {sum(sizes):,} records within {_PRODUCE_LIMIT_S:g} s"
        raise BrokerError(msg)
    return topic


@contextmanager
def connected(server: SparkConnectServer) -> Iterator[Any]:
    """Open a new session on the server."""
    session = SparkSession.builder.remote(server.remote).create()
    try:
        yield session
    finally:
        session.stop()


def _next(topic: str, positions: list[int], count: int, records: int) -> list[OffsetRange]:
    each, ranges = records // count, []
    for number in range(count):
        ranges.append(OffsetRange(topic, number, positions[number], positions[number] + each))
        positions[number] += each
    return ranges


def _by_hand(session: Any, kafka: KafkaCluster, ranges: Sequence[OffsetRange]) -> DataFrame:  # noqa: ANN401
    topic = ranges[0].topic
    frame: DataFrame = (
        session.read.format("kafka")
        .option("kafka.bootstrap.servers", kafka.bootstrap_servers)
        .option("assign", json.dumps({topic: [one.partition for one in ranges]}))
        .option(
            "startingOffsets",
            json.dumps({topic: {str(one.partition): one.start for one in ranges}}),
        )
        .option(
            "endingOffsets", json.dumps({topic: {str(one.partition): one.until for one in ranges}})
        )
        .load()
    )
    return frame


def _read_all(frame: DataFrame) -> None:
    """Read each record without a sink."""
    frame.selectExpr("sum(length(value)) AS bytes", "count(1) AS records").collect()


def _took_s(work: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    work()
    return time.perf_counter() - began_at
