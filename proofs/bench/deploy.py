"""`deploy_duplicates` and `stream_deploy_gap`: a rolling deploy under load, and a kill -9.

Each contender runs alone on its own topic with the same load, batches and output. The first
benchmark counts the output records, the second measures gaps between commits in Kafka.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.deployment import CodeLocation, DagsterDeployment
from dagster_rebalance.testing.fixtures import unique_name
from dagster_rebalance.testing.processes import ChildProcess
from proofs.bench import structured_streaming
from proofs.bench.deploy_work import BATCH_S, BLOCKING, POLLED, Work, lost_and_doubled
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.spark_batches import connected
from proofs.bench.streams import (
    BATCHES,
    LOCATION,
    ROOT,
    STREAM,
    Body,
    committed_ranges,
    committed_records,
)
from proofs.witness.committed import longest_gap
from proofs.witness.producer import NumberedProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pyspark.sql.connect.streaming.query import StreamingQuery

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.spark_connect import SparkConnectServer
    from proofs.bench.deploy_work import Written

_PROJECT = "proofs.bench.deploy_project"
_PARTITIONS, _PER_SECOND = 8, 1000
_WORKERS = 2
_SETTLED = 3
"""Number of last batches of each partition that a version must have processed."""
_WARM_BATCHES = 10
"""Number of micro-batches of Structured Streaming before its stop."""
_LIMIT_S = 300.0
_QUIET_S = 90.0
"""Records missing after this time without output are lost. Kafka detects a kill after 45 s."""
_GAP_GOAL_S = 3.0
_PEERS = {
    POLLED: "a sensor that polls and commits in its tick",
    BLOCKING: "members that block in their callback",
    BATCHES: "a run for each batch",
    structured_streaming.NAME: "Structured Streaming, stopped and started from its checkpoint",
}


@dataclass(frozen=True)
class _Play:
    """A contender under load, with the first version of its code."""

    work: Work
    producer: NumberedProducer
    roll_out: Callable[[], None]
    committed: Callable[[], int | None]

    def deploy(self) -> None:
        """Deploy the second version."""
        self.work.version.write_text("v2")
        self.roll_out()
        self.settle("v2")

    def settle(self, version: str) -> None:
        """Wait until a version works on all partitions in several processes."""

        def is_settled() -> bool:
            self.producer.check()
            return has_settled(self.work.output(), version)

        what = f"{version} to work on all partitions of {self.work.topic}"
        wait_until(is_settled, timeout_s=_LIMIT_S, what=what, interval_s=0.5)

    def kill_one(self) -> None:
        """Kill a process in the middle of a batch."""

        def is_killed() -> bool:
            for process in self.work.at_work():
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(process, signal.SIGKILL)
                    return True
            return False

        what = f"a process of {self.work.topic} at work"
        wait_until(is_killed, timeout_s=_LIMIT_S, what=what, interval_s=0.01)

    def lost_and_doubled(self) -> tuple[int, int]:
        """Stop producing, and count once all records are committed or no more output comes."""
        self.producer.stop()
        ends, output = self.producer.ends, self.work.output()
        since = time.monotonic()
        while lost_and_doubled(output, ends)[0] or self.committed() != sum(ends):
            time.sleep(1.0)
            before, output = len(output), self.work.output()
            if len(output) > before:
                since = time.monotonic()
            elif time.monotonic() > since + _QUIET_S:
                break
        return lost_and_doubled(output, ends)


def measure_duplicates(
    kafka: KafkaCluster, *, runs: int, step: Callable[[str], None]
) -> list[Entry]:
    """Deploy, kill a process, and count lost and doubled records."""
    counted = defaultdict(list)
    for run in range(runs):
        for contender in (STREAM, POLLED, BLOCKING):
            step(f"deploy_duplicates, {contender}, run {run + 1} of {runs}")
            with _played(kafka, contender) as play:
                play.deploy()
                play.kill_one()
                counted[contender].append(play.lost_and_doubled())
    return duplicates_entries(counted)


def duplicates_entries(counted: Mapping[str, Sequence[tuple[int, int]]]) -> list[Entry]:
    """Return the lost and doubled records of streaming runs beside each peer, in total."""
    sums = {
        contender: (sum(lost for lost, _ in found), sum(doubled for _, doubled in found))
        for contender, found in counted.items()
    }
    return [
        Entry(
            "deploy_duplicates",
            f"records {what} over a rolling deploy and a kill -9, against {_PEERS[peer]}",
            f"records {what}, ours",
            "records",
            Goal("<=", 0),
            [Sample(sums[STREAM][column], sums[peer][column], sums[STREAM][column])],
            f"turns: {len(counted[STREAM])}, summed up",
        )
        for peer in (POLLED, BLOCKING)
        for column, what in enumerate(("lost", "done twice"))
    ]


def measure_gap(
    kafka: KafkaCluster, server: SparkConnectServer, *, runs: int, step: Callable[[str], None]
) -> list[Entry]:
    """Deploy, and measure the longest gap between commits of a partition."""
    gaps_s = defaultdict(list)
    for run in range(runs):
        for form in (STREAM, BATCHES):
            step(f"stream_deploy_gap, {form}, run {run + 1} of {runs}")
            with _played(kafka, form) as play:
                since = time.time()
                play.deploy()
                until = time.time()
            commits = committed_ranges(kafka, f"{play.work.topic}-{form}")
            gap_s, _ = longest_gap(((one.partition, one.at) for one in commits), since, until)
            gaps_s[form].append(gap_s)
        step(f"stream_deploy_gap, Structured Streaming, run {run + 1} of {runs}")
        gaps_s[structured_streaming.NAME].append(_restart_gap_s(kafka, server))
    return gap_entries(gaps_s)


def gap_entries(gaps_s: Mapping[str, Sequence[float]]) -> list[Entry]:
    """Return the longest gap of streaming runs in all rounds beside that of each peer."""
    case = f"longest time without a commit of a partition in a deploy of {_WORKERS} runs"
    ours = max(gaps_s[STREAM])
    return [
        Entry(
            "stream_deploy_gap",
            f"{case}, against {_PEERS[peer]}",
            "s, ours",
            "s",
            Goal("<=", _GAP_GOAL_S + BATCH_S),
            [Sample(ours, max(gaps_s[peer]), ours)],
            f"turns: {len(gaps_s[STREAM])}, the longest; medians {median(gaps_s[STREAM]):.2f} and "
            f"{median(gaps_s[peer]):.2f}",
        )
        for peer in (BATCHES, structured_streaming.NAME)
    ]


def has_settled(output: Iterable[Written], version: str) -> bool:
    """Return whether several processes of a version wrote the newest ranges of all partitions."""
    newest: dict[int, list[Written]] = defaultdict(list)
    for one in sorted(output, key=lambda one: one.start, reverse=True):
        if len(newest[one.partition]) < _SETTLED:
            newest[one.partition].append(one)
    found = [one for ranges in newest.values() for one in ranges]
    return (
        len(found) == _PARTITIONS * _SETTLED
        and {one.version for one in found} == {version}
        and len({one.process for one in found}) >= _WORKERS
    )


@contextmanager
def _played(kafka: KafkaCluster, contender: str) -> Iterator[_Play]:
    topic = unique_name(f"deploy-{contender}")
    kafka.create_topic(topic, _PARTITIONS)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        work = Work(kafka.bootstrap_servers, topic, folder)
        work.version.write_text("v1")
        with (
            _load(kafka, topic) as producer,
            _members(work) if contender == BLOCKING else _dagster(work, contender) as roll_out,
        ):
            body = Body(kafka.bootstrap_servers, topic, _PARTITIONS, topic)
            play = _Play(
                work, producer, roll_out, lambda: committed_records(kafka, body, contender)
            )
            play.settle("v1")
            yield play


def _load(kafka: KafkaCluster, topic: str) -> NumberedProducer:
    return NumberedProducer(
        kafka.bootstrap_servers, topic, partitions=_PARTITIONS, per_second=_PER_SECOND
    )


@contextmanager
def _dagster(work: Work, contender: str) -> Iterator[Callable[[], None]]:
    """Run Dagster with the contender's sensor; yields the function that reloads the code."""
    location = CodeLocation(LOCATION, _PROJECT, ROOT, work.environment, reloads=True)
    with DagsterDeployment(Path(work.folder) / "home", [location]) as dagster:
        dagster.ui.start_sensor(LOCATION, f"{contender}_sensor")
        yield lambda: dagster.ui.reload(LOCATION)


@contextmanager
def _members(work: Work) -> Iterator[Callable[[], None]]:
    """Run blocking members; yields the function that replaces them, new ones first."""
    with ExitStack() as stack:

        def start(version: str) -> list[ChildProcess]:
            command = [sys.executable, "-m", "proofs.bench.blocking_member"]
            log = Path(work.folder) / "members.log"
            members = [
                stack.enter_context(
                    ChildProcess("member", command, log=log, env=work.environment, cwd=ROOT)
                )
                for _ in range(_WORKERS)
            ]
            wait_until(
                lambda: any(one.version == version for one in work.output()),
                timeout_s=_LIMIT_S,
                what=f"members of {version}",
                interval_s=0.5,
            )
            return members

        old = start("v1")

        def replace() -> None:
            start("v2")
            for member in old:
                member.stop(timeout_s=30)

        yield replace


def _restart_gap_s(kafka: KafkaCluster, server: SparkConnectServer) -> float:
    """Return the time from the last micro-batch before a stop to the first one after the start."""
    topic = unique_name("deploy-structured")
    kafka.create_topic(topic, _PARTITIONS)

    def ends(query: StreamingQuery, *, least: int = 1) -> list[float] | None:
        found = sorted(at for at, _ in structured_streaming.micro_batches(query).values())
        return found if len(found) >= least else None

    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        connected(server) as session,
        _load(kafka, topic),
    ):
        old = structured_streaming.start(session, kafka, topic, folder)
        wait_until(lambda: ends(old, least=_WARM_BATCHES), timeout_s=_LIMIT_S, what="micro-batches")
        old.stop()
        new = structured_streaming.start(session, kafka, topic, folder)
        after = wait_until(lambda: ends(new), timeout_s=_LIMIT_S, what="a micro-batch")
        new.stop()
        before = ends(old) or []
    return after[0] - before[-1]
