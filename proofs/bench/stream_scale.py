"""`stream_partitions`, `stream_burst`, `stream_end`, `commit_cpu` and `many_partitions`.

They measure one streaming run with hundreds and thousands of partitions and an empty body. All
claims, commits and assignments have the times at which the broker stored them.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from confluent_kafka import Producer

from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.stream_latency import join_and_leave, revokes_in
from proofs.bench.streams import (
    STORAGES,
    STREAM,
    Body,
    committed_records,
    cpu_s,
    dagster_storage,
    loaded_run,
    percentile,
    streaming_run,
)
from proofs.witness.offsets_topic import MemberAssigned, StoredOffset, read_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dagster_rebalance.testing.broker import KafkaCluster
    from proofs.bench.streams import Committed, Loaded
    from proofs.witness.offsets_topic import GroupRecord

_GOALS = {8: 0.1, 100: 0.2, 1_000: 0.5}
"""Maximum 99th percentile in seconds, by number of partitions."""
_FEW, _MANY = 8, 1_000
_PER_SECOND = 2_000
_WINDOWS = 3
_SETTLE_S = 10.0
_LIMIT_S = 300.0
_END_LIMIT_S = 120.0
_BETWEEN_BURSTS_S = 3.0


def measure_partitions(
    kafka: KafkaCluster, *, seconds: float, step: Callable[[str], None]
) -> list[Entry]:
    """Measure claim to commit with few and many partitions, on SQLite and on Postgres."""
    entries = []
    for storage in STORAGES:
        with dagster_storage(storage) as settings:
            for partitions, goal in _GOALS.items():
                step(f"stream_partitions, {partitions:,} partitions, {storage}")
                with loaded_run(
                    kafka, partitions, per_second=_PER_SECOND, storage=settings, waits=True
                ) as loaded:
                    time.sleep(_SETTLE_S)
                    began_at = time.time()
                    found = loaded.claimed_within(seconds)
                windows = windows_of(found, began_at, seconds)
                entries.append(partitions_entry(partitions, storage, goal, windows))
    return entries


def windows_of(
    ranges: Iterable[Committed], began_at: float, seconds: float
) -> list[list[Committed]]:
    """Return the ranges by the third of the measured phase in which they were claimed."""
    windows: list[list[Committed]] = [[] for _ in range(_WINDOWS)]
    for one in ranges:
        number = int((one.claimed_at - began_at) / seconds * _WINDOWS)
        windows[min(max(number, 0), _WINDOWS - 1)].append(one)
    return windows


def partitions_entry(
    partitions: int, storage: str, goal: float, windows: Iterable[Sequence[Committed]]
) -> Entry:
    """Return the 99th percentile of each part of the measured phase."""
    took = [[one.took_s for one in window] for window in windows if window]
    if not took:
        msg = f"the run with {partitions} partitions has committed nothing"
        raise DagsterRebalanceError(msg)
    p50 = median(percentile(each, 0.5) for each in took)
    return Entry(
        "stream_partitions",
        f"{partitions:,} partitions, {_PER_SECOND:,} records/s, empty body, {storage}, p99",
        "s",
        "s",
        Goal("<=", goal),
        [Sample(p99, None, p99) for p99 in (percentile(each, 0.99) for each in took)],
        f"{sum(map(len, took)):,} ranges; p50 {p50:.3f} s",
    )


def measure_burst(kafka: KafkaCluster, *, bursts: int, step: Callable[[str], None]) -> list[Entry]:
    """Produce one record to each of many partitions at once, repeatedly."""
    step("stream_burst, starting a streaming run")
    began: list[float] = []
    with _waiting_run(kafka, _MANY) as body:
        for number in range(1, 1 + bursts):
            step(f"stream_burst, {number} of {bursts}")
            began.append(time.time())
            _produce_one_each(kafka, body)
            _wait_for_commits(kafka, body, number * _MANY)
            time.sleep(_BETWEEN_BURSTS_S)
        records = read_group(kafka.bootstrap_servers, f"{body.group}-{STREAM}")
    took = burst_times(records, began, _MANY)
    return [
        Entry(
            "stream_burst",
            f"one record in each of {_MANY:,} partitions, until the last commit",
            "s, the longest",
            "s",
            Goal("<=", 1),
            [Sample(max(took), None, max(took))],
            f"bursts: {len(took)}; median {median(took):.2f} s",
        )
    ]


def burst_times(
    records: Iterable[GroupRecord], began: Sequence[float], partitions: int
) -> list[float]:
    """Return the seconds from the begin of each burst to the last commit of its records."""
    last = [0.0] * len(began)
    done = [0] * partitions
    for one in records:
        if isinstance(one, StoredOffset) and one.offset > done[one.partition]:
            for number in range(done[one.partition], min(one.offset, len(began))):
                last[number] = max(last[number], one.at)
            done[one.partition] = one.offset
    return [end - begin for begin, end in zip(began, last, strict=True)]


def measure_end(kafka: KafkaCluster, *, runs: int, step: Callable[[str], None]) -> list[Entry]:
    """Terminate streaming runs whose partitions are all active."""
    samples = []
    for run in range(runs):
        step(f"stream_end, run {run + 1} of {runs}")
        with loaded_run(kafka, _MANY, per_second=_PER_SECOND, waits=True) as loaded:
            time.sleep(_SETTLE_S)
            began_at = time.monotonic()
            loaded.process.send(signal.SIGTERM)
            with suppress(DagsterRebalanceError):  # it counts with the limit
                loaded.process.wait(_END_LIMIT_S)
            took_s = time.monotonic() - began_at
            samples.append(Sample(took_s, None, took_s))
    case = f"SIGTERM with {_MANY:,} active partitions, until the process has ended"
    return [Entry("stream_end", case, "s", "s", Goal("<=", 5), samples)]


def measure_commit_cpu(
    kafka: KafkaCluster, *, runs: int, seconds: float, step: Callable[[str], None]
) -> list[Entry]:
    """Measure the CPU of the member's thread for a commit, in turn with few and many partitions."""
    samples = []
    for run in range(runs):
        costs = []
        for partitions in (_MANY, _FEW):
            step(f"commit_cpu, {partitions:,} partitions, run {run + 1} of {runs}")
            costs.append(_commit_cost_s(kafka, partitions, seconds))
        many_s, few_s = costs
        samples.append(Sample(1e6 * many_s, 1e6 * few_s, many_s / few_s))
    case = f"{_MANY:,} partitions against {_FEW}, {_PER_SECOND:,} records/s"
    return [Entry("commit_cpu", case, "that with 8", "µs for a commit", Goal("<=", 2), samples)]


def _commit_cost_s(kafka: KafkaCluster, partitions: int, seconds: float) -> float:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        threads = Path(folder) / "threads.json"
        with loaded_run(
            kafka, partitions, per_second=_PER_SECOND, waits=True, threads=str(threads)
        ) as loaded:
            time.sleep(_SETTLE_S)
            member = member_thread(json.loads(threads.read_text()))
            pid = loaded.process.pid
            before, since = cpu_s(pid, member), time.time()
            time.sleep(seconds)
            used_s, until = cpu_s(pid, member) - before, time.time()
            commits = _commits_between(loaded, since, until)
    return used_s / max(1, commits)


def member_thread(threads: dict[str, int]) -> int:
    """Return the id of the thread of the member loop, among the threads of a streaming run."""
    return next(number for name, number in threads.items() if name.startswith("member of run"))


def _commits_between(loaded: Loaded, since: float, until: float) -> int:
    ranges = loaded.committed()
    return sum(since <= one.at < until for one in ranges)


def measure_many(
    kafka: KafkaCluster, *, partitions: int, step: Callable[[str], None]
) -> list[Entry]:
    """Give one run thousands of partitions, and let another member take half of them."""
    step(f"many_partitions, creating {partitions:,} partitions")
    with ExitStack() as stack:
        body = stack.enter_context(_waiting_run(kafka, partitions, with_records=True))
        step("many_partitions, waiting until all records are committed")
        _wait_for_commits(kafka, body, partitions)
        time.sleep(_SETTLE_S)
        step("many_partitions, another member joins")
        group = f"{body.group}-{STREAM}"
        join_and_leave(kafka, group, body.topic)
        time.sleep(_SETTLE_S)
        records = read_group(kafka.bootstrap_servers, group)
    return many_entries(records, partitions)


def many_entries(records: Sequence[GroupRecord], partitions: int) -> list[Entry]:
    """Return the time to the first claim, and that of the hold."""
    begun_s = first_claim_after_s(records)
    revokes = revokes_in(records)
    if not revokes:
        msg = "Kafka asked for no partition of the streaming run"
        raise DagsterRebalanceError(msg)
    held_s = max(until - since for since, until, _ in revokes)
    name = "many_partitions"
    return [
        Entry(
            name,
            f"{partitions:,} partitions, from the assignment to the first claim",
            "s",
            "s",
            Goal("<=", 10),
            [Sample(begun_s, None, begun_s)],
        ),
        Entry(
            name,
            f"a hold of {partitions // 2:,} of them with nothing at work",
            "s",
            "s",
            Goal("<=", 5),
            [Sample(held_s, None, held_s)],
        ),
    ]


def first_claim_after_s(records: Iterable[GroupRecord]) -> float:
    """Return the seconds from the first assignment of partitions to the first claim."""
    assigned_at: float | None = None
    for one in records:
        if isinstance(one, MemberAssigned) and one.partitions and assigned_at is None:
            assigned_at = one.at
        elif (
            isinstance(one, StoredOffset)
            and assigned_at is not None
            and decode(OffsetAndMetadata(one.offset, one.metadata)).claims
        ):
            return one.at - assigned_at
    msg = "the streaming run was assigned nothing, or has claimed nothing"
    raise DagsterRebalanceError(msg)


@contextmanager
def _waiting_run(
    kafka: KafkaCluster, partitions: int, *, with_records: bool = False
) -> Iterator[Body]:
    """Run a streaming run on a topic without a load, or with one record in each partition."""
    topic = unique_name("waiting")
    kafka.create_topic(topic, partitions)
    body = Body(
        kafka.bootstrap_servers, topic, partitions, topic, waits=True, from_start=with_records
    )
    if with_records:
        _produce_one_each(kafka, body)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as home,
        streaming_run(kafka, Path(home), body),
    ):
        if not with_records:
            _wait_for_commits(kafka, body, 0)
            time.sleep(_SETTLE_S)
        yield body
    kafka.delete_topic(topic)


def _produce_one_each(kafka: KafkaCluster, body: Body) -> None:
    producer = Producer({**kafka.client_config(), "linger.ms": 5})
    for number in range(body.partitions):
        producer.produce(body.topic, b"{}", partition=number)
        producer.poll(0)
    producer.flush(_LIMIT_S)


def _wait_for_commits(kafka: KafkaCluster, body: Body, records: int) -> None:
    wait_until(
        lambda: committed_records(kafka, body, STREAM) == records or None,
        timeout_s=_LIMIT_S,
        what=f"{records:,} records to be committed by {body.group}",
        interval_s=0.5,
    )
