"""`bad_records`: a backlog with 10 bad records, beside the same backlog without bad records.

The same code processes both topics, in turn. It sets bad records aside with `good_rows`, or it
raises, and the group has `on_failure="bisect"` with two attempts and no delay between them. The
time of a backlog counts from its first claim to its last commit.

Before, each form processes the backlog with bad records once, unmeasured: `kill -9` ends a run
after its output and before its commit, and the next run is replaced by that of a new version while
it works. Mended code then replays the letters. Rows and letters are counted after each turn.
"""

from __future__ import annotations

import enum
import os
import random
import signal
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import dagster as dg
import pyarrow as pa
from confluent_kafka import Producer
from pyarrow import compute, dataset

from dagster_rebalance import KafkaConsumerResource
from dagster_rebalance.core.model.errors import BrokerError, DagsterRebalanceError
from dagster_rebalance.core.model.letters import LetterState
from dagster_rebalance.orchestration.operators.letters import (
    LetterRequest,
    plan_replay,
)
from dagster_rebalance.orchestration.operators.requests import Reruns
from dagster_rebalance.orchestration.resources.letter_topic import DeadLetterTopic
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.deployment import CodeLocation, DagsterDeployment
from dagster_rebalance.testing.fixtures import unique_name
from proofs.bench.arrow_output import PAD, PARTITIONS, RECORD_BYTES
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.streams import (
    AT_WORK,
    BAD,
    BATCHES,
    HOLD,
    LOCATION,
    MENDED,
    PARQUET,
    PROJECT,
    ROOT,
    STREAM,
    VERSION,
    Body,
    committed_ranges,
    committed_records,
    cpu_with_children_s,
    streaming_run,
    turned_on,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from dagster_rebalance.core.model.letters import LetterFold
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.spark_connect import SparkConnectServer

BAD_RECORDS = 10
SET_ASIDE, BISECTED = "set aside", "bisected"
GOALS = {SET_ASIDE: Goal("<=", 1.1), BISECTED: Goal("<=", 1.5)}
_LIMIT_S = 3600.0
_LOOK_S = 0.1
_LEAST_RUNS = {STREAM: 2, BATCHES: 1}
"""Live runs during a deploy: the new streaming run starts before the other one leaves."""
_KEY = 1 << 40


class Form(enum.Enum):
    """A form of run, with what it reads and writes with."""

    STREAM_ARROW = "stream-arrow"
    STREAM_SPARK = "stream-spark"
    BATCH_SPARK = "batch-spark"
    BATCH_ARROW = "batch-arrow"

    def __str__(self) -> str:
        runs = "streaming runs" if self.run == STREAM else "per-batch runs"
        return f"{runs}, {'Arrow' if self.is_arrow else 'Spark'}"

    @property
    def run(self) -> str:
        return STREAM if self in {Form.STREAM_ARROW, Form.STREAM_SPARK} else BATCHES

    @property
    def is_arrow(self) -> bool:
        return self in {Form.STREAM_ARROW, Form.BATCH_ARROW}


@dataclass(frozen=True, slots=True)
class Wrong:
    """The number of wrong records and letters of a turn.

    Attributes:
        rows: Good records that are lost or doubled in the output, and bad records in it.
        letters: Bad records without a letter, other letters, and letters beyond the first.
        replayed: Records that are lost or doubled after the replay, and letters that are open.
    """

    rows: int = 0
    letters: int = 0
    replayed: int = 0

    def __add__(self, other: Wrong) -> Wrong:
        return Wrong(
            self.rows + other.rows, self.letters + other.letters, self.replayed + other.replayed
        )

    def __str__(self) -> str:
        return f"rows {self.rows}, letters {self.letters}, after the replay {self.replayed}"

    @property
    def total(self) -> int:
        return self.rows + self.letters + self.replayed


@dataclass(frozen=True, slots=True)
class Timed:
    """The figures of a turn without faults.

    Attributes:
        took_s: Seconds from the first claim to the last commit.
        cpu_s: CPU seconds of the runs and of Spark.
        wrong: Wrong records and letters.
    """

    took_s: float
    cpu_s: float
    wrong: Wrong

    def __str__(self) -> str:
        return f"{self.took_s:.2f} s ({self.cpu_s:.1f} s of CPU; {self.wrong})"


@dataclass(frozen=True)
class _Backlog:
    kafka: KafkaCluster
    servers: Callable[[], SparkConnectServer]
    topic: str
    records: int
    per_range: int
    bad: tuple[int, ...] = ()
    """The numbers of the bad records."""


@dataclass(frozen=True)
class _Turn:
    """A group that processes a backlog."""

    backlog: _Backlog
    form: str
    body: Body
    folder: Path

    @property
    def group_id(self) -> str:
        return f"{self.body.group}-{self.form}"

    def wait_for(self, records: int) -> None:
        wait_until(
            lambda: (committed_records(self.backlog.kafka, self.body, self.form) or 0) >= records,
            timeout_s=_LIMIT_S,
            what=f"{records:,} records to be committed by {self.group_id}",
            interval_s=_LOOK_S,
        )

    @property
    def took_s(self) -> float:
        ranges = committed_ranges(self.backlog.kafka, self.group_id)
        return max(one.at for one in ranges) - min(one.claimed_at for one in ranges)

    @property
    def resource(self) -> KafkaConsumerResource:
        return KafkaConsumerResource(
            bootstrap_servers=self.body.brokers,
            group_id=self.group_id,
            topics=[self.backlog.topic],
            dead_letter_topic=self.body.dead,
        )

    @property
    def letters(self) -> LetterFold:
        return DeadLetterTopic(self.resource).read()

    @property
    def wrong(self) -> Wrong:
        """The wrong rows and letters before a replay."""
        bad = [_place(number) for number in self.backlog.bad]
        wanted = {f"{self.backlog.topic}-{number}-{offset}" for number, offset in bad}
        entries = self.letters.entries.values()
        found = {one.letter.key for one in entries if one.letter is not None}
        repeats = sum(one.repeats for one in entries)
        rows = wrong_rows(_rows(self.body), self.backlog.records, bad)
        return Wrong(rows, len(found ^ wanted) + repeats)

    @property
    def wrong_after_replay(self) -> int:
        closed = self.letters.counts[LetterState.REPLAYED]
        left = abs(closed - len(self.backlog.bad))
        return left + wrong_rows(_rows(self.body), self.backlog.records, ())


def measure(
    kafka: KafkaCluster,
    servers: Callable[[], SparkConnectServer],
    *,
    runs: int,
    records: int,
    per_range: int,
    forms: Sequence[Form],
    step: Callable[[str], None],
) -> list[Entry]:
    """Process both topics with each form and way, in turn. `servers` starts Spark Connect."""
    backlogs = []
    for bad in (bad_numbers(records), ()):
        step(f"bad_records, producing {records:,} records, {len(bad)} of them bad")
        topic = unique_name("bad")
        produce(kafka, topic, records, bad)
        backlogs.append(_Backlog(kafka, servers, topic, records, per_range, bad))
    entries = []
    case = f"{records:,} records of {RECORD_BYTES} bytes to Parquet in ranges of {per_range:,}"
    for form in forms:
        for way, goal in GOALS.items():
            what = f"bad_records, {form}, {way}"
            step(f"{what}, with a kill -9, a deploy and a replay")
            wrong = _faulted(backlogs[0], form, way)
            step(f"{what}: {wrong}")
            turns: list[tuple[Timed, Timed]] = []
            for run in range(1, 1 + runs):
                step(f"{what}, run {run} of {runs}")
                found = [
                    _timed(one, form, way) for one in (backlogs if run % 2 else backlogs[::-1])
                ]
                ours, peer = found if run % 2 else found[::-1]
                turns.append((ours, peer))
                step(f"{what}: {ours} against {peer}")
            entries += entries_of(f"{form}, {way}", case, goal, turns, wrong)
    for backlog in backlogs:
        kafka.delete_topic(backlog.topic)
    return entries


def entries_of(
    what: str, case: str, goal: Goal, turns: Sequence[tuple[Timed, Timed]], faulted: Wrong
) -> list[Entry]:
    """Return the times with and without bad records, and the number of errors in all turns."""
    name, case = "bad_records", f"{BAD_RECORDS} bad of {case}, {what}"
    samples = [Sample(one.took_s, peer.took_s, one.took_s / peer.took_s) for one, peer in turns]
    cpu_s = median(one.cpu_s for one, _ in turns), median(peer.cpu_s for _, peer in turns)
    wrong = sum((one.wrong for turn in turns for one in turn), faulted)
    return [
        Entry(
            name,
            case,
            "the time without",
            "s",
            goal,
            samples,
            "CPU seconds {:.1f} and {:.1f}".format(*cpu_s),
        ),
        Entry(
            name,
            f"records and letters lost or doubled, {what}",
            "records, ours",
            "records",
            Goal("<=", 0),
            [Sample(wrong.total, None, wrong.total)],
            f"{wrong}; a kill -9 and a deploy before the replay",
        ),
    ]


def bad_numbers(records: int) -> tuple[int, ...]:
    """Return the numbers of the bad records: a random one in each tenth of the topic."""
    every = records // BAD_RECORDS
    chosen = random.Random(records)  # noqa: S311 - the same ones in each run
    return tuple(every * nth + chosen.randrange(every) for nth in range(BAD_RECORDS))


def _place(number: int) -> tuple[int, int]:
    """Return the partition and the offset of a record."""
    return number % PARTITIONS, number // PARTITIONS


def produce(kafka: KafkaCluster, topic: str, records: int, bad: Sequence[int]) -> None:
    """Create a topic with different records, in turn in each partition, some of them bad.

    Raises:
        BrokerError: Kafka did not confirm them in time.
    """
    kafka.create_topic(topic, PARTITIONS)
    producer = Producer(
        {**kafka.client_config(), "linger.ms": 50, "queue.buffering.max.messages": 0}
    )
    wanted = frozenset(bad)
    for number in range(records):
        value = b"%09d" % number + PAD
        producer.produce(
            topic,
            BAD.encode() + value[len(BAD) :] if number in wanted else value,
            partition=number % PARTITIONS,
        )
        if number % 10_000 == 0:
            producer.poll(0)
    if producer.flush(_LIMIT_S):
        msg = f"Kafka did not confirm all records of {topic} in {_LIMIT_S:g} s"
        raise BrokerError(msg)


@contextmanager
def _turn(backlog: _Backlog, form: Form, way: str) -> Iterator[_Turn]:
    """Prepare a group with its topic of letters and its folders."""
    kafka, group = backlog.kafka, unique_name("bad")
    kafka.create_topic(f"{group}-dead")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        for inner in ("lake", "play"):
            (folder / inner).mkdir()
        (folder / "play" / VERSION).write_text("1")
        body = Body(
            kafka.bootstrap_servers,
            backlog.topic,
            PARTITIONS,
            group,
            remote="" if form.is_arrow else backlog.servers().remote,
            output=str(folder / "lake" / "out"),
            records_per_range=backlog.per_range,
            from_start=True,
            sink=PARQUET if form.is_arrow else "",
            dead=f"{group}-dead",
            raises=way == BISECTED,
            play=str(folder / "play"),
        )
        yield _Turn(backlog, form.run, body, folder)
    kafka.delete_topic(f"{group}-dead")


def _timed(backlog: _Backlog, form: Form, way: str) -> Timed:
    """Process a backlog without faults."""
    with _turn(backlog, form, way) as turn, ExitStack() as stack:
        home, pids = turn.folder / "home", []
        if form.run == STREAM:
            run = streaming_run(backlog.kafka, home, turn.body)
            pids.append(stack.enter_context(run).pid)
        else:
            dagster = stack.enter_context(_deployed(turn, home))
            pids.append(dagster.locations[LOCATION].server.pid)
        if not form.is_arrow:
            pids.append(backlog.servers().process.pid)
        used_s = sum(map(cpu_with_children_s, pids))
        turn.wait_for(backlog.records)
        used_s = sum(map(cpu_with_children_s, pids)) - used_s
        stack.close()
        return Timed(turn.took_s, used_s, turn.wrong)


@contextmanager
def _deployed(turn: _Turn, home: Path) -> Iterator[DagsterDeployment]:
    location = CodeLocation(LOCATION, PROJECT, ROOT, turn.body.environment, reloads=True)
    with DagsterDeployment(home, [location]) as dagster, turned_on(dagster, turn.form):
        yield dagster


def _faulted(backlog: _Backlog, form: Form, way: str) -> Wrong:
    """Process a backlog through a kill -9 and a deploy, and replay its letters."""
    with _turn(backlog, form, way) as turn:
        play = turn.folder / "play"
        (play / HOLD).write_text(str(backlog.records // PARTITIONS // 2))
        with _deployed(turn, turn.folder / "home") as dagster:
            os.kill(_at_work(play), signal.SIGKILL)
            _at_work(play)
            _deploy(dagster, play, "2")
            with dagster.instance() as instance:
                _wait_for_runs(instance, form.run)
            (play / HOLD).unlink()
            turn.wait_for(backlog.records)
            wrong = turn.wrong
            _deploy(dagster, play, MENDED)
            with dagster.instance() as instance:
                _replay(instance, turn)
            return replace(wrong, replayed=turn.wrong_after_replay)


def _at_work(play: Path) -> int:
    """Wait for a process that is held at the end of a batch, and return its id."""
    file = play / AT_WORK
    file.unlink(missing_ok=True)
    process_id = wait_until(
        lambda: (file.exists() and file.read_text()) or None,  # it may not be written yet
        timeout_s=_LIMIT_S,
        what="a batch in the middle of the topic",
        interval_s=_LOOK_S,
    )
    return int(process_id)


def _deploy(dagster: DagsterDeployment, play: Path, version: str) -> None:
    (play / VERSION).write_text(version)

    def is_deployed() -> bool:
        with suppress(DagsterRebalanceError):  # on a busy machine it takes more than a minute
            dagster.ui.reload(LOCATION)
            return True
        return False

    wait_until(is_deployed, timeout_s=_LIMIT_S, what=f"version {version}", interval_s=1.0)


def _wait_for_runs(instance: dg.DagsterInstance, form: str) -> None:
    started = dg.RunsFilter(job_name=form, statuses=[dg.DagsterRunStatus.STARTED])
    wait_until(
        lambda: instance.get_runs_count(started) >= _LEAST_RUNS[form],
        timeout_s=_LIMIT_S,
        what="the runs of the new version",
        interval_s=1.0,
    )


def _replay(instance: dg.DagsterInstance, turn: _Turn) -> None:
    request = LetterRequest((), everything=True, containing="", by="bench", why="mended")
    Reruns(instance, turn.resource).begin(plan_replay(instance, turn.resource, request))
    wait_until(
        lambda: turn.letters.counts[LetterState.REPLAYED] >= len(turn.backlog.bad),
        timeout_s=_LIMIT_S,
        what=f"the replay of the letters of {turn.group_id}",
        interval_s=1.0,
    )


def _rows(body: Body) -> pa.Table:
    return dataset.dataset(body.output, format="parquet").to_table(columns=["partition", "offset"])


def wrong_rows(rows: pa.Table, records: int, bad: Collection[tuple[int, int]]) -> int:
    """Return the number of lost and doubled good records, and of bad ones, in an output."""
    offsets, numbers = (compute.cast(rows[name], pa.int64()) for name in ("offset", "partition"))
    keys = compute.add(compute.multiply(numbers, _KEY), offsets)
    places = pa.array([number * _KEY + offset for number, offset in bad], pa.int64())
    good = keys.filter(compute.invert(compute.is_in(keys, places)))
    distinct: int = compute.count_distinct(good).as_py()
    lost, doubled = records - len(bad) - distinct, len(good) - distinct
    return abs(lost) + doubled + len(keys) - len(good)
