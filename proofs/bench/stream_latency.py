"""`stream_claim_to_commit`, `stream_idle` and `stream_revoke`: overhead of streaming runs.

They measure a batch without work in both forms on one Dagster and one topic, the CPU of a run
without records, and the time from Kafka's request to the release while batches take a second.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from confluent_kafka import Consumer

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.deployment import AT_ONCE, CodeLocation, DagsterDeployment
from dagster_rebalance.testing.fixtures import unique_name
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.streams import (
    BATCHES,
    LOCATION,
    PROJECT,
    ROOT,
    STORAGES,
    STREAM,
    Body,
    committed_ranges,
    cpu_s,
    dagster_storage,
    loaded_run,
    percentile,
    stored_partitions,
    streaming_run,
    turned_on,
    wait_for_commits,
)
from proofs.witness.offsets_topic import MemberAssigned, read_group
from proofs.witness.producer import NumberedProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dagster_rebalance.testing.broker import KafkaCluster
    from proofs.bench.streams import Committed
    from proofs.witness.offsets_topic import GroupRecord

_PARTITIONS, _PER_SECOND = 8, 1000
_SETTLE_S, _START_LIMIT_S = 3.0, 240.0
_IDLE_GOALS = {1_000: 0.02, 10_000: 0.06}
"""Maximum share of a core by number of partitions."""
_IDLE_TIMES = 6
"""An idle phase is this much longer than others: it has to contain the reads of every 30 s."""
_QUIET_WINDOW_S, _QUIET_SHARE, _QUIET_LIMIT_S = 5.0, 0.8, 300.0
_BATCH_S = 1.0
_AFTER_RELEASE_S = 1.0
"""Batches claimed this long after a release count as after it."""


@dataclass(frozen=True)
class _Stage:
    """A Dagster with both forms, and its Kafka."""

    kafka: KafkaCluster
    dagster: DagsterDeployment
    body: Body


def measure_latency(
    kafka: KafkaCluster, *, runs: int, seconds: float, step: Callable[[str], None]
) -> list[Entry]:
    """Run empty batches in a streaming run and in per-batch runs, on SQLite and on Postgres."""
    entries = []
    for storage in STORAGES:
        with ExitStack() as stack:
            settings = {**AT_ONCE, **stack.enter_context(dagster_storage(storage))}
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            topic = unique_name("latency")
            kafka.create_topic(topic, _PARTITIONS)
            body = Body(kafka.bootstrap_servers, topic, _PARTITIONS, topic)
            location = CodeLocation(LOCATION, PROJECT, ROOT, body.environment)
            dagster = stack.enter_context(
                DagsterDeployment(home / "home", [location], settings=settings)
            )
            stack.enter_context(
                NumberedProducer(
                    kafka.bootstrap_servers,
                    topic,
                    partitions=_PARTITIONS,
                    per_second=_PER_SECOND,
                )
            )
            stage = _Stage(kafka, dagster, body)
            streams, batches = [], 0.0
            for run in range(runs):
                step(f"stream_claim_to_commit, {storage}, run {run + 1} of {runs}")
                streams.append(_play(stage, STREAM, seconds))
                if not run:
                    step(f"stream_claim_to_commit, {storage}, a run for each batch")
                    found = _play(stage, BATCHES, seconds)
                    batches = median(one.took_s for one in found)
        entries += latency_entries(storage, streams, batches)
    return entries


def latency_entries(
    storage: str, streams: Sequence[Sequence[Committed]], batches: float
) -> list[Entry]:
    """Return percentiles of each streaming run, beside the median of the other form."""
    took = [[one.took_s for one in found] for found in streams]
    p50, p99 = ([percentile(each, share) for each in took] for share in (0.5, 0.99))
    case = f"{_PARTITIONS} partitions, {_PER_SECOND:,} records/s, empty body, {storage}"
    note = f"{sum(map(len, took)):,} ranges"
    name = "stream_claim_to_commit"
    return [
        Entry(
            name,
            f"{case}, p50",
            "s",
            "s",
            Goal("<=", 0.06),
            [Sample(each, None, each) for each in p50],
            note,
        ),
        Entry(
            name,
            f"{case}, p99",
            "s",
            "s",
            Goal("<=", 0.25),
            [Sample(each, None, each) for each in p99],
            note,
        ),
        Entry(
            name,
            f"{case}, p50 against a run for each batch",
            "the peer's time",
            "s",
            Goal(">=", 100),
            [Sample(each, batches, batches / each) for each in p50],
            "the peer was measured once, after the first run",
        ),
    ]


def _play(stage: _Stage, form: str, seconds: float) -> list[Committed]:
    """Turn a form on and off, and return the commits of the steady phase."""
    group, since = f"{stage.body.group}-{form}", 0.0

    def settled() -> list[Committed] | None:
        found = [one for one in committed_ranges(stage.kafka, group) if one.at >= since]
        return found if len(found) >= _PARTITIONS else None

    with turned_on(stage.dagster, form):
        wait_for_commits(stage.kafka, stage.body, form, timeout_s=_START_LIMIT_S)
        time.sleep(_SETTLE_S)
        since = time.time()
        time.sleep(seconds)
        return wait_until(
            settled, timeout_s=_START_LIMIT_S, what=f"more batches of {group}", interval_s=3.0
        )


def measure_idle(
    kafka: KafkaCluster, *, runs: int, seconds: float, most: int, step: Callable[[str], None]
) -> list[Entry]:
    """Measure the CPU of streaming runs whose partitions have no records.

    `most` limits the number of partitions.
    """
    return [
        _idle(kafka, min(partitions, most), goal, runs=runs, seconds=seconds, step=step)
        for partitions, goal in _IDLE_GOALS.items()
    ]


def _idle(
    kafka: KafkaCluster,
    partitions: int,
    goal: float,
    *,
    runs: int,
    seconds: float,
    step: Callable[[str], None],
) -> Entry:
    topic = unique_name("idle")
    kafka.create_topic(topic, partitions)
    body = Body(kafka.bootstrap_servers, topic, partitions, topic, waits=True)
    samples = []
    step(f"stream_idle, starting a streaming run with {partitions:,} partitions")
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as home,
        streaming_run(kafka, Path(home), body) as process,
    ):
        _wait_until_quiet(kafka, body, process.pid)
        for run in range(runs):
            step(f"stream_idle, run {run + 1} of {runs}")
            before, began_at = cpu_s(process.pid), time.monotonic()
            time.sleep(_IDLE_TIMES * seconds)
            used_s, passed_s = cpu_s(process.pid) - before, time.monotonic() - began_at
            samples.append(Sample(used_s, None, used_s / passed_s))
    kafka.delete_topic(topic)
    case = f"a streaming run with {partitions:,} idle partitions"
    unit = f"s of CPU in {_IDLE_TIMES * seconds:g} s"
    return Entry("stream_idle", case, "a core", unit, Goal("<=", goal), samples)


def _wait_until_quiet(kafka: KafkaCluster, body: Body, pid: int) -> None:
    """Wait until a run has stored the offsets of all partitions, and its CPU no longer falls."""
    wait_until(
        lambda: stored_partitions(kafka, body, STREAM) == body.partitions or None,
        timeout_s=_QUIET_LIMIT_S,
        what=f"the offsets of all partitions of {body.group}",
        interval_s=1.0,
    )
    used = [float("inf")]

    def is_quiet() -> bool | None:
        before = cpu_s(pid)
        time.sleep(_QUIET_WINDOW_S)
        used.append(cpu_s(pid) - before)
        return used[-1] >= _QUIET_SHARE * used[-2] or None

    wait_until(is_quiet, timeout_s=_QUIET_LIMIT_S, what=f"{body.group} to be quiet")


def measure_revoke(
    kafka: KafkaCluster, *, rebalances: int, step: Callable[[str], None]
) -> list[Entry]:
    """Let another member join and leave repeatedly while batches take a second."""
    step("stream_revoke, starting a streaming run")
    with loaded_run(kafka, _PARTITIONS, per_second=_PER_SECOND, sleep_s=_BATCH_S) as loaded:
        topic, group = loaded.body.topic, f"{loaded.body.group}-{STREAM}"
        time.sleep(2 * _SETTLE_S)
        for number in range(rebalances):
            step(f"stream_revoke, {number + 1} of {rebalances}")
            join_and_leave(kafka, group, topic)
            time.sleep(_SETTLE_S + _BATCH_S * number / rebalances)  # at any point of a batch
        records = read_group(kafka.bootstrap_servers, group)
        commits = loaded.committed()
    revokes = revokes_in(records)
    if not revokes:
        msg = f"Kafka asked for no partition of {group}"
        raise DagsterRebalanceError(msg)
    took = [until - since for since, until, _ in revokes]
    rates = [retained_rate(commits, *revoke, after_s=_AFTER_RELEASE_S) for revoke in revokes]
    case = f"batches of {_BATCH_S:g} s, from Kafka's request to the release"
    note = f"{len(took)} revokes, the longest; median {median(took):.2f}"
    steady = _PER_SECOND / _PARTITIONS
    return [
        Entry(
            "stream_revoke",
            case,
            "s",
            "s",
            Goal("<=", 1.5),
            [Sample(max(took), None, max(took))],
            note,
        ),
        Entry(
            "stream_revoke",
            "retained partitions, from the last commit before the request to one after the release",
            "of what was produced",
            "records/s of a partition",
            Goal(">=", 0.98),
            [Sample(rate, None, rate / steady) for rate in rates],
        ),
    ]


def join_and_leave(kafka: KafkaCluster, group: str, topic: str) -> None:
    settings = {"group.id": group, "group.protocol": "consumer", "enable.auto.commit": False}
    with closing(Consumer({**kafka.client_config(), **settings})) as other:
        other.subscribe([topic])
        wait_until(
            lambda: other.poll(0.1) is not None or other.assignment() or None,
            timeout_s=_START_LIMIT_S,
            what="another member to get partitions",
        )


def revokes_in(records: Iterable[GroupRecord]) -> list[tuple[float, float, frozenset[int]]]:
    """Return the revoke requests, the releases, and the retained partitions."""
    asked: dict[str, tuple[float, frozenset[int]]] = {}
    found = []
    for record in records:
        if not isinstance(record, MemberAssigned):
            continue
        if record.asked_back and record.member_id not in asked:
            kept = (record.partitions or frozenset()) - record.asked_back
            asked[record.member_id] = (record.at, kept)
        elif not record.asked_back and record.member_id in asked:
            since, kept = asked.pop(record.member_id)
            found.append((since, record.at, kept))
    return found


def retained_rate(
    commits: Sequence[Committed],
    since: float,
    until: float,
    kept: frozenset[int],
    *,
    after_s: float,
) -> float:
    """Return the records per second of a retained partition, between two commits around a hold."""
    rates = []
    for partition in kept:
        mine = [one for one in commits if one.partition == partition]
        before = [one for one in mine if one.at < since]
        after = [one for one in mine if one.claimed_at >= until + after_s]
        if before and after:
            first, last = before[-1], after[0]
            records = sum(one.records for one in mine if first.at < one.at <= last.at)
            rates.append(records / (last.at - first.at))
    return sum(rates) / len(rates) if rates else 0.0
