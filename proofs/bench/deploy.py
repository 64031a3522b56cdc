"""`deploy_duplicates` and `stream_deploy_gap`: a rolling deploy and a kill -9 under load.

Streaming runs play first, then a sensor that polls and commits in its tick beside members that
block in their callbacks: under the same load each, with the same faults. What is counted is the
output, record by record, when all of it is there or no more comes.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.errors import DagsterRebalanceError
from dagster_rebalance.orchestration.tags import VERSION_TAG
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.deployment import CodeLocation, DagsterDeployment
from dagster_rebalance.testing.fixtures import unique_name
from dagster_rebalance.testing.processes import ChildProcess
from proofs.bench.deploy_work import BATCH_S, BLOCKING, OURS, POLLED, Work, lost_and_doubled
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.spark_batches import COLUMNS, connected
from proofs.bench.streams import ROOT, committed_ranges
from proofs.witness.producer import NumberedProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.spark_connect import SparkConnectServer

_PARTITIONS, _PER_SECOND = 8, 1000
_LIMIT_S, _STEADY_S = 90.0, 6.0
_QUIET_S = 40.0
"""Without more output for so long, what is missing then is lost."""
_GAP_GOAL_S = 3.0
_LOCATION, _STREAM_SENSOR, _POLLED_SENSOR = "shop", "streamed_job_sensor", "polled_sensor"
_CASES = {
    POLLED: "a sensor that polls and commits in its tick",
    BLOCKING: "members that block in their callback",
}


@dataclass(frozen=True)
class Counted:
    """What became of the records that were produced."""

    lost: int
    doubled: int


@dataclass
class _Play:
    """One play of the faults, on one topic and one Dagster."""

    kafka: KafkaCluster
    work: Work
    dagster: DagsterDeployment
    instance: dg.DagsterInstance
    producer: NumberedProducer

    def deploy(self) -> None:
        """Load new code."""
        self.work.version.write_text("v2")
        self.dagster.ui.reload(_LOCATION)

    def live(self, job: str) -> list[dg.DagsterRun]:
        """The runs of a job that have not ended."""
        runs = self.instance.get_runs(dg.RunsFilter(job_name=job))
        return [run for run in runs if not run.is_finished]

    def kill(self, run: dg.DagsterRun) -> None:
        """Kill the process of a run."""
        messages = " ".join(entry.message for entry in self.instance.all_logs(run.run_id))
        found = re.search(r"Executing steps in process \(pid: (\d+)\)", messages)
        if found is None:
            msg = f"run {run.run_id} has not said which process it is"
            raise DagsterRebalanceError(msg)
        os.kill(int(found[1]), signal.SIGKILL)

    def counted(self, contender: str) -> Counted:
        """Stop producing, and count once all is there, or nothing has come for a while."""
        self.producer.stop()
        last, since = -1, time.monotonic()
        while time.monotonic() < since + _QUIET_S:
            output = self.work.output(contender)
            lost, _ = lost_and_doubled(output, self.producer.ends)
            if not lost:
                break
            if len(output) != last:
                last, since = len(output), time.monotonic()
            time.sleep(1.0)
        return Counted(*lost_and_doubled(self.work.output(contender), self.producer.ends))


def measure(
    kafka: KafkaCluster, server: Callable[[], SparkConnectServer], *, step: Callable[[str], None]
) -> list[Entry]:
    """Play it once for ours and once for both peers, and stop and start Structured Streaming."""
    step("deploy_duplicates, streaming runs")
    ours, gap_s = _play_ours(kafka)
    step("deploy_duplicates, a polling sensor and members that block in their callback")
    peers = _play_peers(kafka)
    step("stream_deploy_gap, Structured Streaming stopped and started")
    peer_gap_s = _restart_structured_streaming(kafka, server())
    entries = []
    for contender, peer in peers.items():
        for what, mine, theirs in (
            ("lost", ours.lost, peer.lost),
            ("done twice", ours.doubled, peer.doubled),
        ):
            entries.append(
                Entry(
                    "deploy_duplicates",
                    f"records {what} over a rolling deploy and a kill -9, against "
                    f"{_CASES[contender]}",
                    f"records {what}, ours",
                    "records",
                    Goal("<=", 0),
                    [Sample(mine, theirs, mine)],
                )
            )
    entries.append(
        Entry(
            "stream_deploy_gap",
            "longest time in which a partition commits nothing in a rolling deploy of 2 runs, "
            "against Structured Streaming stopped and started from its checkpoint",
            "s",
            "s",
            Goal("<=", _GAP_GOAL_S + BATCH_S),
            [Sample(gap_s, peer_gap_s, gap_s)],
            "the peer's server was warm and stayed",
        )
    )
    return entries


def _play_ours(kafka: KafkaCluster) -> tuple[Counted, float]:
    with _played(kafka) as play:
        play.dagster.ui.start_sensor(_LOCATION, _STREAM_SENSOR)

        def is_shared(version: str) -> bool | None:
            live = play.live("streamed_job")
            running = [run for run in live if run.status is dg.DagsterRunStatus.STARTED]
            is_new = [run.tags.get(VERSION_TAG) for run in live] == [version] * 2
            return (is_new and len(running) == 2) or None  # noqa: PLR2004 - two runs share the work

        def wait_for(what: str, version: str) -> None:
            wait_until(lambda: is_shared(version), timeout_s=_LIMIT_S, what=what, interval_s=0.5)
            time.sleep(_STEADY_S)

        wait_for("two streaming runs", "v1")
        began_at = time.time()
        play.deploy()
        wait_for("two streaming runs of the new code", "v2")
        ended_at = time.time()
        victim, *_ = play.live("streamed_job")
        play.kill(victim)
        wait_until(
            lambda: victim.run_id not in {run.run_id for run in play.live("streamed_job")} or None,
            timeout_s=_LIMIT_S,
            what="the killed run to be noticed",
            interval_s=0.5,
        )
        wait_for("another run in its place", "v2")
        counted = play.counted(OURS)
        commits = committed_ranges(kafka, f"{play.work.topic}-{OURS}")
        play.dagster.ui.stop_sensor(_LOCATION, _STREAM_SENSOR)
    times = defaultdict(list)
    for one in commits:
        times[one.partition].append(one.at)
    gaps = [
        later - earlier
        for ats in times.values()
        for earlier, later in pairwise(ats)
        if later > began_at and earlier < ended_at
    ]
    return counted, max(gaps)


def _play_peers(kafka: KafkaCluster) -> dict[str, Counted]:
    with _played(kafka) as play, ExitStack() as stack:

        def members() -> list[ChildProcess]:
            return [stack.enter_context(_blocking_member(play.work)) for _ in range(2)]

        def wait_for_output(contender: str) -> None:
            before = len(play.work.output(contender))
            wait_until(
                lambda: len(play.work.output(contender)) > before or None,
                timeout_s=_LIMIT_S,
                what=f"output of {contender}",
                interval_s=0.2,
            )

        old = members()
        play.dagster.ui.start_sensor(_LOCATION, _POLLED_SENSOR)
        wait_for_output(POLLED)
        wait_for_output(BLOCKING)
        new = members()
        time.sleep(_STEADY_S)
        for member in old:
            member.stop(timeout_s=30)
        play.deploy()
        time.sleep(_STEADY_S)
        new[0].kill()
        wait_until(
            lambda: _kill_one_at_work(play),
            timeout_s=_LIMIT_S,
            what="a run at work",
            interval_s=0.1,
        )
        members()
        wait_for_output(POLLED)
        time.sleep(_STEADY_S)
        found = {contender: play.counted(contender) for contender in (POLLED, BLOCKING)}
        play.dagster.ui.stop_sensor(_LOCATION, _POLLED_SENSOR)
    return found


def _kill_one_at_work(play: _Play) -> bool | None:
    """Kill a run of the polling sensor whose process has begun."""
    for run in play.live("polled"):
        try:
            play.kill(run)
        except (DagsterRebalanceError, ProcessLookupError):
            continue  # it has not begun, or has just ended
        return True
    return None


@contextmanager
def _played(kafka: KafkaCluster) -> Iterator[_Play]:
    topic = unique_name("deploy")
    kafka.create_topic(topic, _PARTITIONS)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        work = Work(kafka.bootstrap_servers, topic, folder)
        work.version.write_text("v1")
        location = CodeLocation(
            _LOCATION,
            "proofs.bench.deploy_project",
            ROOT,
            {**work.environment, "PYTHONPATH": str(ROOT)},
            reloads=True,
        )
        with (
            DagsterDeployment(Path(folder) / "home", [location]) as dagster,
            dagster.instance() as instance,
            NumberedProducer(
                kafka.bootstrap_servers, topic, partitions=_PARTITIONS, per_second=_PER_SECOND
            ) as producer,
        ):
            yield _Play(kafka, work, dagster, instance, producer)


@contextmanager
def _blocking_member(work: Work) -> Iterator[ChildProcess]:
    process = ChildProcess(
        "blocking member",
        [sys.executable, "-m", "proofs.bench.blocking_member"],
        log=Path(work.folder) / f"member-{time.time()}.log",
        env=work.environment,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.stop_at_once()


def _restart_structured_streaming(kafka: KafkaCluster, server: SparkConnectServer) -> float:
    """The time between the ends of two micro-batches, with a stop and a start between them."""
    topic = unique_name("restart")
    kafka.create_topic(topic, _PARTITIONS)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        connected(server) as session,
        NumberedProducer(
            kafka.bootstrap_servers, topic, partitions=_PARTITIONS, per_second=_PER_SECOND
        ),
    ):

        def start() -> Any:  # noqa: ANN401 - of pyspark's Connect part
            return (
                session.readStream.format("kafka")
                .option("kafka.bootstrap.servers", kafka.bootstrap_servers)
                .option("subscribe", topic)
                .option("startingOffsets", "earliest")
                .load()
                .selectExpr(*COLUMNS)
                .writeStream.format("parquet")
                .option("path", f"{folder}/out")
                .option("checkpointLocation", f"{folder}/checkpoint")
                .start()
            )

        def ends(query: Any) -> list[float] | None:  # noqa: ANN401
            found = [
                datetime.fromisoformat(one["timestamp"].replace("Z", "+00:00")).timestamp()
                + one["durationMs"]["triggerExecution"] / 1000
                for one in query.recentProgress
                if one["numInputRows"]
            ]
            return found or None

        query = start()
        wait_until(lambda: ends(query), timeout_s=_LIMIT_S, what="a micro-batch", interval_s=0.5)
        time.sleep(_STEADY_S)
        before = (ends(query) or [])[-1]
        query.stop()
        query = start()
        after = wait_until(
            lambda: ends(query), timeout_s=_LIMIT_S, what="a micro-batch", interval_s=0.1
        )
        query.stop()
    return after[0] - before
