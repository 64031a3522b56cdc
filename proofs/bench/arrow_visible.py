"""`arrow_visible`: records from their production to a reader of a Delta Lake table.

One streaming run writes the table from Arrow under a constant load. A reader in another process
than the run asks for new versions of the table repeatedly, and notes when it has each of them. From
then on the records of the version are visible. The time of a record is its timestamp in Kafka,
which is that of the producer's call.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from confluent_kafka import Producer
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyarrow import compute, parquet

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from proofs.bench.arrow_output import PAD, PARTITIONS, RECORD_BYTES
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.streams import DELTA, STREAM, Body, committed_records, streaming_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self

    from dagster_rebalance.testing.broker import KafkaCluster

_PER_SECOND = 20_000
_ROUND_S = 0.01
_LINGER_MS = 5
_MOST_WAITING = 10_000_000
_WINDOWS = 3
_SETTLE_S = 10.0
_LOOK_S = 0.01
_LIMIT_S = 60.0
_GOALS = {0.5: 0.3, 0.99: 1.0}
"""Maximum seconds, by percentile."""


def measure(kafka: KafkaCluster, *, seconds: float, step: Callable[[str], None]) -> list[Entry]:
    """Produce at a constant rate, and measure when each record is visible."""
    step("arrow_visible, starting a streaming run")
    topic = unique_name("visible")
    kafka.create_topic(topic, PARTITIONS)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        table = Path(folder) / "out"
        body = Body(
            kafka.bootstrap_servers,
            topic,
            PARTITIONS,
            topic,
            output=str(table),
            from_start=True,
            sink=DELTA,
            timestamps=True,
        )
        with streaming_run(kafka, Path(folder) / "home", body), _Reader(table) as reader:
            with _Load(kafka, topic) as load:
                time.sleep(_SETTLE_S)
                step(f"arrow_visible, {seconds:g} s")
                began_at = time.time()
                time.sleep(seconds)
            wait_until(
                lambda: committed_records(kafka, body, STREAM) == load.records,
                timeout_s=_LIMIT_S,
                what=f"the commit of {load.records:,} records",
                interval_s=0.5,
            )
            wait_until(reader.has_newest, timeout_s=_LIMIT_S, what="the last version")
        records = visible_records(table, reader.seen)
    kafka.delete_topic(topic)
    if records.num_rows != load.records:
        msg = f"{load.records:,} records were produced, and {records.num_rows:,} written"
        raise DagsterRebalanceError(msg)
    return visible_entries(records, began_at, seconds, len(reader.seen))


def visible_records(table: Path, seen: Iterable[tuple[int, float]]) -> pa.Table:
    """Return the times of all records, `produced` and `took`, in seconds.

    Args:
        table: The folder of the table.
        seen: The versions that the reader had, in order, each with the time.
    """
    parts, next_version = [], 0
    for last, at in seen:
        for version in range(next_version, last + 1):
            log = (table / "_delta_log" / f"{version:020}.json").read_text()
            for action in map(json.loads, log.splitlines()):
                if "add" in action:
                    file = parquet.read_table(table / action["add"]["path"], columns=["timestamp"])
                    produced = compute.divide(compute.cast(file["timestamp"], pa.int64()), 1e6)
                    took = compute.subtract(pa.scalar(at), produced)
                    parts.append(pa.table({"produced": produced, "took": took}))
        next_version = last + 1
    return pa.concat_tables(parts)


def visible_entries(
    records: pa.Table, began_at: float, seconds: float, versions: int
) -> list[Entry]:
    """Return the percentiles of each third of the measured time."""
    samples: dict[float, list[Sample]] = {share: [] for share in _GOALS}
    window_s = seconds / _WINDOWS
    for number in range(_WINDOWS):
        since = began_at + number * window_s
        is_in = compute.and_(
            compute.greater_equal(records["produced"], since),
            compute.less(records["produced"], since + window_s),
        )
        took = records.filter(is_in)["took"]
        if not len(took):
            msg = f"no record was produced from second {number * window_s:g} on"
            raise DagsterRebalanceError(msg)
        for share, found in samples.items():
            took_s = compute.quantile(took, share, interpolation="lower")[0].as_py()
            found.append(Sample(took_s, None, took_s))
    case = f"{_PER_SECOND:,} records/s of {RECORD_BYTES} bytes into Delta Lake from Arrow"
    note = f"{records.num_rows:,} records, {versions:,} versions"
    return [
        Entry(
            "arrow_visible",
            f"{case}, from producing to a reader, p{100 * share:g}",
            "s",
            "s",
            Goal("<=", _GOALS[share]),
            found,
            note,
        )
        for share, found in samples.items()
    ]


class _Worker(threading.Thread):
    """A thread that works from entry to exit."""

    def __init__(self) -> None:
        super().__init__(name=type(self).__name__, daemon=True)
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()


class _Load(_Worker):
    """Produces at a constant rate.

    Attributes:
        records: Number of produced records.
    """

    def __init__(self, kafka: KafkaCluster, topic: str) -> None:
        super().__init__()
        self.records = 0
        self._topic = topic
        # A producer whose broker is slow keeps its rate: the wait is part of the figures.
        settings = {"linger.ms": _LINGER_MS, "queue.buffering.max.messages": _MOST_WAITING}
        self._producer = Producer({**kafka.client_config(), **settings})

    def run(self) -> None:
        """Produce, and at the end wait for the confirmations."""
        next_at = time.monotonic()
        while not self._stopped.wait(max(0.0, next_at - time.monotonic())):
            for _ in range(round(_PER_SECOND * _ROUND_S)):
                value = b"%09d" % self.records + PAD
                self._producer.produce(self._topic, value, partition=self.records % PARTITIONS)
                self.records += 1
            self._producer.poll(0)
            next_at += _ROUND_S
        self._producer.flush(_LIMIT_S)


class _Reader(_Worker):
    """Asks for new versions of a table.

    Attributes:
        seen: Each version that it had, with the time.
    """

    def __init__(self, table: Path) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []
        self._path = table

    def run(self) -> None:
        """Ask until the exit."""
        table: DeltaTable | None = None
        while not self._stopped.wait(_LOOK_S):
            if table is None:
                with suppress(TableNotFoundError):
                    table = DeltaTable(self._path)
            else:
                table.update_incremental()
            if table is not None and (not self.seen or table.version() > self.seen[-1][0]):
                self.seen.append((table.version(), time.time()))

    def has_newest(self) -> bool:
        """Return whether it has the newest version."""
        return bool(self.seen) and self.seen[-1][0] == DeltaTable(self._path).version()
