"""`arrow_streams`: two streaming runs from Kafka through Arrow, beside Structured Streaming.

Two runs of one group and a query of Structured Streaming take turns at one topic on the same cores.
Both write Parquet, or the runs write Delta Lake and Iceberg, and the query Delta Lake. The Spark
Connect server is warm. With a table, `kill -9` ends one of the runs when half of the records are
committed, and the other run takes over its partitions. The query runs undisturbed.

Rates count from end to end of batches. That of the runs begins with the first batch of the second
run and ends with the kill. CPU is that of all processes of a contender. That of the runs includes
the batches that are repeated after the kill. At the end, the rows of the output are counted.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import DeltaTable
from pyarrow import dataset

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from proofs.bench import structured_streaming
from proofs.bench.arrow_output import PARTITIONS, RECORD_BYTES, produce
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.spark_batches import connected
from proofs.bench.stream_spark import Meter, ends_of, records_per_second
from proofs.bench.streams import (
    DELTA,
    GATE,
    ICEBERG,
    ICEBERG_TABLE,
    PARQUET,
    STREAM,
    Body,
    committed_ranges,
    committed_records,
    streaming_runs,
)
from proofs.chaos.sinks import catalog
from proofs.witness.offsets_topic import MemberAssigned, read_group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.processes import ChildProcess
    from dagster_rebalance.testing.spark_connect import SparkConnectServer

_RUNS = 2
_PEERS = {PARQUET: PARQUET, DELTA: DELTA, ICEBERG: DELTA}
"""Formats of the runs, and those of the query that they are compared with."""
_NAMES = {PARQUET: "Parquet", DELTA: "Delta Lake", ICEBERG: "Iceberg"}
_WARM_UP = 1
"""Unmeasured rounds, in which Spark compiles its code."""
_LEAST_BATCHES = 3
_MOST_RECORDS = 200_000
"""Records of a batch: a run with larger batches needs more than 500 MB of memory."""
_LOOK_S = 0.1
_LIMIT_S = 900.0


@dataclass(frozen=True)
class _Backlog:
    """The backlog that all contenders process from its beginning."""

    kafka: KafkaCluster
    topic: str
    records: int
    size: int


@dataclass(frozen=True, slots=True)
class Played:
    """The figures of one turn.

    Attributes:
        rate: Records per second.
        cpu_s: CPU seconds of a million records.
        resident_mb: Largest resident memory of a process, in MB.
        after_kill_s: Seconds from the kill to the last commit.
        lost: Records that are not in the output.
        doubled: Rows of records that are in the output more than once, beyond the first.
    """

    rate: float
    cpu_s: float
    resident_mb: float = 0.0
    after_kill_s: float | None = None
    lost: int = 0
    doubled: int = 0


def measure(
    kafka: KafkaCluster,
    servers: Mapping[str, Callable[[], SparkConnectServer]],
    *,
    runs: int,
    records: int,
    batches: int,
    step: Callable[[str], None],
) -> list[Entry]:
    """Process the backlog with each format and with its peer, in turn.

    `servers` starts the Spark Connect server of a format, on first use.
    """
    batches = max(batches, records // _MOST_RECORDS)
    each = records // batches // PARTITIONS
    backlog = _Backlog(kafka, unique_name("arrow"), each * batches * PARTITIONS, each * PARTITIONS)
    step(f"arrow_streams, producing {backlog.records:,} records")
    produce(kafka, backlog.topic, backlog.records)
    ours: dict[str, list[Played]] = defaultdict(list)
    peers: dict[str, list[Played]] = defaultdict(list)
    for run in range(1 - _WARM_UP, 1 + runs):
        number = f"run {run} of {runs}" if run > 0 else "warming up"
        for peer in (PARQUET, DELTA):
            turns: list[tuple[dict[str, list[Played]], str]] = [
                (ours, sink) for sink, other in _PEERS.items() if other == peer and run > 0
            ]
            turns.insert(run % 2 * len(turns), (peers, peer))
            for found, sink in turns:
                if found is peers:
                    step(f"arrow_streams, Structured Streaming to {_NAMES[sink]}, {number}")
                    played = _structured(backlog, servers[sink](), sink)
                else:
                    step(f"arrow_streams, {_RUNS} runs to {_NAMES[sink]}, {number}")
                    played = _stream(backlog, sink)
                if run > 0:
                    found[sink].append(played)
    kafka.delete_topic(backlog.topic)
    case = f"{backlog.records:,} records of {RECORD_BYTES} bytes in batches of {backlog.size:,}"
    return [
        entry
        for sink, peer in _PEERS.items()
        for entry in entries_of(sink, case, ours[sink], peers[peer])
    ]


def entries_of(
    sink: str, case: str, ours: Sequence[Played], peers: Sequence[Played]
) -> list[Entry]:
    """Return the figures of a format beside those of its peer, round by round.

    Lost and doubled records are those of all rounds, and the memory is the largest of all.
    """
    name = "arrow_streams"
    against = f"{_RUNS} runs to {_NAMES[sink]}, {case}, against Structured Streaming"
    waited = [one.after_kill_s for one in ours if one.after_kill_s is not None]
    note = f"a kill -9; after it, the rest took {max(waited):.1f} s at most" if waited else ""
    compared = [
        Entry(name, what + against, "the peer's figure", unit, goal, samples, note)
        for what, unit, goal, samples in (
            ("", "records/s", Goal(">=", 1.5), _compared(ours, peers, "rate")),
            ("CPU of a million records, ", "s", Goal("<=", 0.5), _compared(ours, peers, "cpu_s")),
        )
    ]
    alone = [
        Entry(
            name,
            f"{what}, {_NAMES[sink]}",
            f"{unit}, ours",
            unit,
            Goal("<=", most),
            [Sample(value, None, value)],
            note,
        )
        for what, unit, most, value in (
            ("records lost", "records", 0, sum(one.lost for one in ours)),
            ("records done twice", "records", 0, sum(one.doubled for one in ours)),
            ("resident memory of a run", "MB", 500, max(one.resident_mb for one in ours)),
        )
    ]
    return [*compared, *alone]


def _compared(ours: Sequence[Played], peers: Sequence[Played], key: str) -> list[Sample]:
    pairs = [(getattr(one, key), getattr(peer, key)) for one, peer in zip(ours, peers, strict=True)]
    return [Sample(one, peer, one / peer) for one, peer in pairs]


def _structured(backlog: _Backlog, server: SparkConnectServer, sink: str) -> Played:
    """Process the backlog with Structured Streaming."""
    seen: dict[int, tuple[float, int]] = {}
    meter = Meter(server.process.pid)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, connected(server) as session:
        most = {"maxOffsetsPerTrigger": str(backlog.size)}
        query = structured_streaming.start(
            session, backlog.kafka, backlog.topic, folder, options=most, sink=sink
        )

        def is_done() -> bool:
            seen.update(structured_streaming.micro_batches(query))
            done = sum(records for _, records in seen.values())
            meter.look(done)
            return done >= backlog.records

        wait_until(is_done, timeout_s=_LIMIT_S, what="Structured Streaming", interval_s=_LOOK_S)
        query.stop()
    return Played(records_per_second(sorted(seen.values())), meter.per_million)


@dataclass
class _Pair:
    """Two streaming runs at work, observed until all records are committed."""

    backlog: _Backlog
    body: Body
    processes: Sequence[ChildProcess]
    is_killed: bool
    meter: Meter = field(init=False)
    begun_at: float = 0.0
    killed_at: float = 0.0
    resident_mb: float = 0.0

    def __post_init__(self) -> None:
        self.meter = Meter(*(process.pid for process in self.processes))

    def wait_until_done(self) -> None:
        """Open the gate once both runs are members, and wait for the last commit."""
        group = f"{self.body.group}-{STREAM}"
        wait_until(
            lambda: self._members(group) == len(self.processes) or None,
            timeout_s=_LIMIT_S,
            what=f"{len(self.processes)} members of {group}",
            interval_s=0.5,
        )
        (Path(self.body.gate) / GATE).touch()
        wait_until(self._is_done, timeout_s=_LIMIT_S, what=group, interval_s=_LOOK_S)

    def _members(self, group: str) -> int:
        for process in self.processes:
            if not process.is_running:
                msg = f"a streaming run has ended: {process.tail()}"
                raise DagsterRebalanceError(msg)
        records = read_group(self.backlog.kafka.bootstrap_servers, group)
        return len({one.member_id for one in records if isinstance(one, MemberAssigned)})

    def _is_done(self) -> bool:
        done = committed_records(self.backlog.kafka, self.body, STREAM) or 0
        self.resident_mb = max(self.resident_mb, *map(_resident_mb, self.processes))
        if not self.begun_at:
            notes = [Path(self.body.gate) / str(process.pid) for process in self.processes]
            if all(note.exists() for note in notes):
                self.begun_at = time.time()
        if self.begun_at:
            self.meter.look(done)
        if self.is_killed and self.begun_at and done >= self.backlog.records / 2:
            self.is_killed = False
            self.killed_at = time.time()
            self.processes[0].kill()
        return done >= self.backlog.records

    def rate(self, ends: Sequence[tuple[float, int]]) -> float:
        """Return the records per second while both runs were at work."""
        until = self.killed_at or ends[-1][0]
        both = [one for one in ends if self.begun_at <= one[0] <= until]
        if len(both) < _LEAST_BATCHES:
            msg = f"both runs ended only {len(both)} batches: give more records (--backlog)"
            raise DagsterRebalanceError(msg)
        return records_per_second(both)


def _stream(backlog: _Backlog, sink: str) -> Played:
    """Process the backlog with two streaming runs. With a table, kill one of them."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        for inner in ("gate", "lake"):
            (folder / inner).mkdir()
        body = Body(
            backlog.kafka.bootstrap_servers,
            backlog.topic,
            PARTITIONS,
            unique_name("arrow"),
            output=str(folder / "lake" if sink == ICEBERG else folder / "lake" / "out"),
            records_per_range=backlog.size // PARTITIONS,
            from_start=True,
            sink=sink,
            gate=str(folder / "gate"),
        )
        with streaming_runs(backlog.kafka, folder / "home", body, runs=_RUNS) as processes:
            pair = _Pair(backlog, body, processes, is_killed=sink != PARQUET)
            pair.wait_until_done()
        ends = ends_of(committed_ranges(backlog.kafka, f"{body.group}-{STREAM}"))
        lost, doubled = lost_and_doubled(_rows(sink, Path(body.output)), backlog.records)
        return Played(
            pair.rate(ends),
            pair.meter.per_million,
            pair.resident_mb,
            ends[-1][0] - pair.killed_at if pair.killed_at else None,
            lost,
            doubled,
        )


def _resident_mb(process: ChildProcess) -> float:
    """Return the largest resident memory that a process has had; 0 if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1000
    return 0.0


def _rows(sink: str, output: Path) -> pa.Table:
    """Return the partition and the offset of each row of an output."""
    names = ["partition", "offset"]
    if sink == ICEBERG:
        found: Any = catalog(output).load_table(ICEBERG_TABLE)
        return found.scan(selected_fields=tuple(names)).to_arrow()
    if sink == DELTA:
        return DeltaTable(output).to_pyarrow_table(columns=names)
    return dataset.dataset(output, format="parquet").to_table(columns=names)


def lost_and_doubled(rows: pa.Table, records: int) -> tuple[int, int]:
    """Return the numbers of missing records, and of rows beyond the first of a record."""
    grouped = rows.group_by("partition").aggregate([("offset", "count_distinct")])
    distinct = sum(grouped["offset_count_distinct"].to_pylist())
    return records - distinct, rows.num_rows - distinct
