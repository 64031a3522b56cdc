"""Micro-batches through Spark: a streaming run beside Spark Structured Streaming.

Both read a backlog of one topic in batches of the same size, through the same Spark Connect server,
to Parquet, one after the other. What is compared is the time from the end of one batch to the end
of the next one, which is all that a batch costs: claims, commits, checkpoints, Dagster's storage.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dagster_rebalance.testing.deadline import wait_until
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.spark_batches import COLUMNS, connected, fill
from proofs.bench.streams import (
    LIMIT_S,
    STREAM,
    Body,
    committed_ranges,
    committed_records,
    streaming_run,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.spark_connect import SparkConnectServer
    from proofs.bench.streams import Committed

_PARTITIONS = 4
_MICRO_RECORDS, _MICRO_BATCHES = 1_000, 30
_BACKLOG_BATCHES = 10
_WARM_UP = 5
"""Batches that are not measured: Spark compiles its code first."""


def measure_micro_batches(
    kafka: KafkaCluster,
    server: SparkConnectServer,
    *,
    runs: int,
    step: Callable[[str], None],
) -> list[Entry]:
    """Work off a backlog of small batches, in turns."""
    each = _MICRO_RECORDS // _PARTITIONS
    topic = fill(kafka, [each * _MICRO_BATCHES] * _PARTITIONS)
    samples = []
    for run in range(runs):
        step(f"stream_micro_batch, run {run + 1} of {runs}")
        ours = _seconds_each(_ours(kafka, server, topic, each, _MICRO_RECORDS * _MICRO_BATCHES))
        peer = _seconds_each(_peer(kafka, server, topic, _MICRO_RECORDS, _MICRO_BATCHES))
        samples.append(Sample(ours, peer, ours / peer))
    case = (
        f"{_MICRO_RECORDS:,} records of {_PARTITIONS} partitions to Parquet, "
        "against Structured Streaming"
    )
    return [Entry("stream_micro_batch", case, "time", "s", Goal("<=", 1.25), samples)]


def measure_backlog(
    kafka: KafkaCluster,
    server: SparkConnectServer,
    *,
    runs: int,
    records: int,
    step: Callable[[str], None],
) -> list[Entry]:
    """Work off a backlog of large batches, in turns."""
    step(f"stream_backlog, producing {records:,} records")
    size = records // _BACKLOG_BATCHES
    each = size // _PARTITIONS
    topic = fill(kafka, [each * _BACKLOG_BATCHES] * _PARTITIONS)
    total = each * _BACKLOG_BATCHES * _PARTITIONS
    samples = []
    for run in range(runs):
        step(f"stream_backlog, run {run + 1} of {runs}")
        ours = _rate(_ours(kafka, server, topic, each, total), size)
        peer = _rate(_peer(kafka, server, topic, size, _BACKLOG_BATCHES), size)
        samples.append(Sample(ours, peer, ours / peer))
    case = f"{total:,} records in batches of {size:,}, against Structured Streaming"
    return [
        Entry("stream_backlog", case, "records/s", "records/s", Goal(">=", 0.95), samples),
    ]


def _ours(
    kafka: KafkaCluster, server: SparkConnectServer, topic: str, each: int, total: int
) -> list[float]:
    """When each batch of a streaming run was committed, oldest first."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        group = f"{topic}-{time.time():.0f}"
        body = Body(
            kafka.bootstrap_servers,
            topic,
            _PARTITIONS,
            group,
            remote=server.remote,
            output=str(Path(folder) / "out"),
            records_per_range=each,
        )
        with streaming_run(kafka, Path(folder) / "home", body):
            wait_until(
                lambda: committed_records(kafka, body, STREAM) == total or None,
                timeout_s=LIMIT_S,
                what=f"{total:,} records to be committed",
                interval_s=1.0,
            )
        return _ends(committed_ranges(kafka, f"{group}-{STREAM}"), each * _PARTITIONS)


def _ends(ranges: Iterable[Committed], size: int) -> list[float]:
    """When each batch of full size was committed."""
    batches: dict[str, list[Committed]] = defaultdict(list)
    for one in ranges:
        batches[one.batch_id].append(one)
    return sorted(
        max(one.at for one in batch)
        for batch in batches.values()
        if sum(one.records for one in batch) == size
    )


def _peer(
    kafka: KafkaCluster, server: SparkConnectServer, topic: str, size: int, batches: int
) -> list[float]:
    """When each micro-batch of Structured Streaming had ended, oldest first."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, connected(server) as session:
        query = (
            session.readStream.format("kafka")
            .option("kafka.bootstrap.servers", kafka.bootstrap_servers)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", str(size))
            .load()
            .selectExpr(*COLUMNS)
            .writeStream.format("parquet")
            .option("path", f"{folder}/out")
            .option("checkpointLocation", f"{folder}/checkpoint")
            .start()
        )
        seen: dict[int, Any] = {}

        def is_done() -> bool | None:
            if query.exception() is not None:
                raise RuntimeError(str(query.exception()))
            for progress in query.recentProgress:
                if progress["numInputRows"] == size:
                    seen[progress["batchId"]] = progress
            return len(seen) >= batches or None

        try:
            wait_until(is_done, timeout_s=LIMIT_S, what="Structured Streaming", interval_s=1.0)
        finally:
            query.stop()
    return sorted(
        datetime.fromisoformat(one["timestamp"].replace("Z", "+00:00")).timestamp()
        + one["durationMs"]["triggerExecution"] / 1000
        for one in seen.values()
    )


def _seconds_each(ends: Sequence[float]) -> float:
    return median(later - earlier for earlier, later in pairwise(ends[_WARM_UP:]))


def _rate(ends: Sequence[float], size: int) -> float:
    """Records a second, from the end of the first batch to that of the last."""
    return size * (len(ends) - 1) / (ends[-1] - ends[0])
