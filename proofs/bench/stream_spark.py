"""`stream_micro_batch` and `stream_backlog`: batches from Kafka to Parquet through Spark.

A streaming run, Spark Structured Streaming and per-batch runs take turns at one topic, with batches
of the same size on the same Spark Connect server. Rates count from end to end of batches, so they
include claims, commits, checkpoints and Dagster's storage. CPU is that of the server and of the
process of the run, and of their ended children, between two counts of the records that are done.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.deployment import CodeLocation, DagsterDeployment
from dagster_rebalance.testing.fixtures import unique_name
from proofs.bench import structured_streaming
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.spark_batches import connected, fill
from proofs.bench.streams import (
    BATCHES,
    LOCATION,
    PROJECT,
    ROOT,
    STREAM,
    Body,
    committed_ranges,
    committed_records,
    cpu_with_children_s,
    streaming_run,
    turned_on,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.spark_connect import SparkConnectServer
    from proofs.bench.streams import Committed

_PARTITIONS = 4
_MICRO_RECORDS = 1_000
_SMALLER = 10
"""The large batches of `stream_backlog` have so many times the records of the small ones."""
_SMALL_BATCHES = 4
"""So many times the number of large batches, because the figures of few batches vary."""
_LOOK_S = 0.25
_MILLION = 1_000_000
_RUNS = 4
"""Number of per-batch runs in a round: they take many seconds and hardly differ."""
_WARM_UP = 1
"""Unmeasured rounds, in which Spark compiles its code."""
_LIMIT_S = 900.0


@dataclass(frozen=True)
class _Backlog:
    """The backlog that all contenders process from its beginning."""

    kafka: KafkaCluster
    server: SparkConnectServer
    topic: str
    size: int
    batches: int

    @property
    def records(self) -> int:
        return self.size * self.batches


class Meter:
    """CPU seconds of processes, each time with the number of records that are done.

    A process that was killed counts with its last figure.
    """

    def __init__(self, *pids: int) -> None:
        self._used_s = dict.fromkeys(pids, 0.0)
        self._found: list[tuple[int, float]] = []

    def look(self, records: int) -> None:
        """Note the CPU seconds, unless as many records were done before."""
        if records > (self._found[-1][0] if self._found else 0):
            for pid in self._used_s:
                with suppress(FileNotFoundError, ProcessLookupError):
                    self._used_s[pid] = cpu_with_children_s(pid)
            self._found.append((records, sum(self._used_s.values())))

    @property
    def per_million(self) -> float:
        """CPU seconds of a million records."""
        (records, used_s), *_, (all_records, all_used_s) = self._found
        return (all_used_s - used_s) / (all_records - records) * _MILLION


@dataclass(frozen=True, slots=True)
class Played:
    """Records per second, and CPU seconds of a million records if they were measured."""

    rate: float
    cpu_s: float | None = None


def measure_micro_batches(
    kafka: KafkaCluster,
    server: SparkConnectServer,
    *,
    runs: int,
    batches: int,
    step: Callable[[str], None],
) -> list[Entry]:
    """Process a backlog of small batches, in turn."""
    backlog = _filled(kafka, server, _MICRO_RECORDS, batches)
    played = _play("stream_micro_batch", backlog, runs=runs, step=step)
    case = f"{backlog.size:,} records of {_PARTITIONS} partitions to Parquet"
    took_s = {form: [backlog.size / one.rate for one in found] for form, found in played.items()}
    goals = {structured_streaming.NAME: Goal("<=", 1), BATCHES: Goal("<=", 0.1)}
    return [
        *entries_of("stream_micro_batch", case, "s", took_s, goals),
        *_cpu_entries("stream_micro_batch", case, played),
    ]


def measure_backlog(
    kafka: KafkaCluster,
    server: SparkConnectServer,
    *,
    runs: int,
    batches: int,
    records: int,
    step: Callable[[str], None],
) -> list[Entry]:
    """Process a backlog of large batches, and one of smaller batches, in turn."""
    entries = []
    large = records // batches
    for size, number in ((large, batches), (large // _SMALLER, batches * _SMALL_BATCHES)):
        step(f"stream_backlog, producing {size * number:,} records")
        backlog = _filled(kafka, server, size, number)
        played = _play("stream_backlog", backlog, runs=runs, step=step)
        case = f"{backlog.records:,} records to Parquet in batches of {backlog.size:,}"
        rates = {form: [one.rate for one in found] for form, found in played.items()}
        goals = {structured_streaming.NAME: Goal(">=", 1), BATCHES: Goal(">=", 1)}
        entries += entries_of("stream_backlog", case, "records/s", rates, goals)
        entries += _cpu_entries("stream_backlog", case, played)
        kafka.delete_topic(backlog.topic)
    return entries


def _cpu_entries(name: str, case: str, played: dict[str, list[Played]]) -> list[Entry]:
    used = {form: [one.cpu_s or 0 for one in found] for form, found in played.items()}
    goals = {structured_streaming.NAME: Goal("<=", 1.1)}
    return entries_of(name, f"CPU of a million records, {case}", "s", used, goals)


def entries_of(
    name: str, case: str, unit: str, found: dict[str, list[float]], goals: dict[str, Goal]
) -> list[Entry]:
    """Return a streaming run beside each peer, round by round."""
    peers = {structured_streaming.NAME: "Structured Streaming", BATCHES: "a run for each batch"}
    return [
        Entry(
            name,
            f"{case}, against {peers[peer]}",
            "the peer's figure",
            unit,
            goal,
            [
                Sample(ours, theirs, ours / theirs)
                for ours, theirs in zip(found[STREAM], found[peer], strict=True)
            ],
        )
        for peer, goal in goals.items()
    ]


def _filled(kafka: KafkaCluster, server: SparkConnectServer, size: int, batches: int) -> _Backlog:
    topic = fill(kafka, [size // _PARTITIONS * batches] * _PARTITIONS)
    return _Backlog(kafka, server, topic, size // _PARTITIONS * _PARTITIONS, batches)


def _play(
    name: str, backlog: _Backlog, *, runs: int, step: Callable[[str], None]
) -> dict[str, list[Played]]:
    """Return the figures of each form in each round."""
    forms: dict[str, Callable[[_Backlog], Played]] = {
        STREAM: _stream,
        structured_streaming.NAME: _structured,
        BATCHES: _batches,
    }
    played = defaultdict(list)
    for run in range(1 - _WARM_UP, 1 + runs):
        turn = (
            [STREAM, structured_streaming.NAME] if run % 2 else [structured_streaming.NAME, STREAM]
        )
        for form in [*turn, BATCHES] if run > 0 else turn:
            step(f"{name}, {form}, " + (f"run {run} of {runs}" if run > 0 else "warming up"))
            found = forms[form](backlog)
            if run > 0:
                played[form].append(found)
    return played


def _stream(backlog: _Backlog) -> Played:
    """Process the backlog with a streaming run."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        body = _body(backlog, folder)
        with streaming_run(backlog.kafka, Path(folder) / "home", body) as run:
            meter = Meter(backlog.server.process.pid, run.pid)
            _wait_for(backlog, body, STREAM, backlog.batches, meter)
        ends = ends_of(committed_ranges(backlog.kafka, f"{body.group}-{STREAM}"))
        return Played(records_per_second(ends), meter.per_million)


def _batches(backlog: _Backlog) -> Played:
    """Process its beginning with per-batch runs."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        body = _body(backlog, folder)
        location = CodeLocation(LOCATION, PROJECT, ROOT, body.environment)
        with (
            DagsterDeployment(Path(folder) / "home", [location]) as dagster,
            turned_on(dagster, BATCHES),
        ):
            _wait_for(backlog, body, BATCHES, _RUNS)
            ends = ends_of(committed_ranges(backlog.kafka, f"{body.group}-{BATCHES}"))
            return Played(records_per_second(ends))


def _structured(backlog: _Backlog) -> Played:
    """Process the backlog with Structured Streaming."""
    seen: dict[int, tuple[float, int]] = {}
    meter = Meter(backlog.server.process.pid)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        connected(backlog.server) as session,
    ):
        most = {"maxOffsetsPerTrigger": str(backlog.size)}
        query = structured_streaming.start(
            session, backlog.kafka, backlog.topic, folder, options=most
        )

        def is_done() -> bool:
            seen.update(structured_streaming.micro_batches(query))
            done = sum(records for _, records in seen.values())
            meter.look(done)
            return done >= backlog.records

        wait_until(is_done, timeout_s=_LIMIT_S, what="Structured Streaming", interval_s=_LOOK_S)
        query.stop()
    return Played(records_per_second(sorted(seen.values())), meter.per_million)


def _body(backlog: _Backlog, folder: str) -> Body:
    return Body(
        backlog.kafka.bootstrap_servers,
        backlog.topic,
        _PARTITIONS,
        unique_name("spark"),
        remote=backlog.server.remote,
        output=f"{folder}/out",
        records_per_range=backlog.size // _PARTITIONS,
    )


def _wait_for(
    backlog: _Backlog, body: Body, form: str, batches: int, meter: Meter | None = None
) -> None:
    records = batches * backlog.size

    def is_done() -> bool:
        done = committed_records(backlog.kafka, body, form) or 0
        if meter is not None:
            meter.look(done)
        return done >= records

    wait_until(
        is_done,
        timeout_s=_LIMIT_S,
        what=f"{records:,} records to be committed by {body.group}-{form}",
        interval_s=_LOOK_S,
    )


def ends_of(ranges: Iterable[Committed]) -> list[tuple[float, int]]:
    """Return the end and the records of each batch, oldest first."""
    batches: dict[str, list[Committed]] = defaultdict(list)
    for one in ranges:
        batches[one.batch_id].append(one)
    return sorted(
        (max(one.at for one in batch), sum(one.records for one in batch))
        for batch in batches.values()
    )


def records_per_second(ends: list[tuple[float, int]]) -> float:
    """Return the rate from the end of the first batch to the end of the last."""
    (since, _), *later = ends
    return sum(records for _, records in later) / (later[-1][0] - since)
