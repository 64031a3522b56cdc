"""Common parts of the benchmarks of streaming runs, with timestamps of Kafka's offsets topic."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from confluent_kafka import KafkaException

from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.orchestration.storage.run_tags import STREAM_TAG
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from dagster_rebalance.testing.postgres import Postgres
from dagster_rebalance.testing.processes import ChildProcess
from proofs.witness.committed import committed_offsets
from proofs.witness.offsets_topic import read_stored_offsets
from proofs.witness.producer import NumberedProducer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.deployment import DagsterDeployment
    from proofs.witness.offsets_topic import StoredOffset

ROOT = Path(__file__).parents[2]
PROJECT, LOCATION = "proofs.bench.stream_project", "bench"
STREAM, BATCHES = "stream", "batches"
PEER = "peer"
"""An empty asset and its sensor, without this package."""
SQLITE, POSTGRES = STORAGES = "SQLite", "Postgres"
PARQUET, DELTA, ICEBERG = SINKS = "parquet", "delta", "iceberg"
COLUMNS = ("topic", "partition", "offset", "CAST(value AS STRING) AS value")
BOUNDS = ("range_start", "range_until")
GATE = "open"
BAD = "bad"
"""The beginning of bad values."""
VERSION, HOLD, AT_WORK = "version", "hold", "at_work"
"""Files in the folder `Body.play`."""
MENDED = "mended"
"""The version for which no value is bad."""
ICEBERG_TABLE = "chaos.streamed"
"""A table in the catalog of `proofs.chaos.sinks`."""
LIMIT_S = 120.0
_ASK_LIMIT_S = 5.0
_LATE_COMMITS_S = 5.0
"""Ranges that are claimed at the end of a measured phase have this time for their commit."""
_VARIABLE = "DAGSTER_REBALANCE_BENCH_BODY"


@dataclass(frozen=True)
class Body:
    """The work of a run of the code location.

    Attributes:
        brokers: The Kafka.
        topic: The topic.
        partitions: Number of partitions.
        group: Prefix of the groups' names.
        sleep_s: Duration of a batch.
        remote: Spark Connect server for the writes; empty without Spark.
        output: Folder of the output.
        records_per_range: Maximum offsets of one partition in a batch.
        ranges_per_run: Maximum partitions of a per-batch run.
        from_start: Whether a new group starts at the beginning of the topic.
        waits: Whether few records wait for more, as by default.
        rows: Whether the asset reports the number of its records as a sum.
        threads: A file for the ids of the threads of a run, by name; empty for none.
        sink: The output from Arrow, without Spark: one of `SINKS`; empty for none.
        timestamps: Whether a table has the timestamps of the records.
        gate: A folder; empty for none. The runs wait for the file `open` in it, and create a file
            named by their process id after each batch.
        dead: The topic of the dead letters of bad values; empty for none.
        raises: Whether a bad value raises, and its range is bisected. Otherwise it is set aside.
        play: A folder with the version of the code; empty for none. While it has the file `hold`,
            batches at or after the offset in it wait at their end, and write their process id into
            the file `at_work`.
    """

    brokers: str
    topic: str
    partitions: int
    group: str
    sleep_s: float = 0.0
    remote: str = ""
    output: str = ""
    records_per_range: int = 100_000
    ranges_per_run: int = 8
    from_start: bool = False
    waits: bool = False
    rows: bool = False
    threads: str = ""
    sink: str = ""
    timestamps: bool = False
    gate: str = ""
    dead: str = ""
    raises: bool = False
    play: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables for the code location."""
        found = {_VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": str(ROOT)}
        if self.sink:
            found["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # docs/which-engine.md
        return found

    @classmethod
    def from_environment(cls) -> Body:
        """Return the settings of this process."""
        return cls(**json.loads(os.environ[_VARIABLE]))


@dataclass(frozen=True, slots=True)
class Committed:
    """A range that was claimed and then committed.

    Attributes:
        partition: Number of the partition.
        records: Number of offsets.
        batch_id: The claiming batch.
        claimed_at: Kafka's timestamp of the claim, in seconds since 1970.
        at: Kafka's timestamp of the commit.
    """

    partition: int
    records: int
    batch_id: str
    claimed_at: float
    at: float

    @property
    def took_s(self) -> float:
        """Seconds from claim to commit."""
        return self.at - self.claimed_at


@dataclass(frozen=True)
class Loaded:
    """A streaming run under a constant load.

    Attributes:
        kafka: The Kafka.
        body: The settings of its code location.
        home: Dagster's folder.
        process: The process of the run.
    """

    kafka: KafkaCluster
    body: Body
    home: Path
    process: ChildProcess

    def claimed_within(self, seconds: float) -> list[Committed]:
        """Wait, and return the ranges that were claimed in that time and then committed."""
        since = time.time()
        time.sleep(seconds)
        until = time.time()
        time.sleep(_LATE_COMMITS_S)
        return [one for one in self.committed() if since <= one.claimed_at < until]

    def committed(self) -> list[Committed]:
        """Return all ranges that the run has claimed and committed, oldest commit first."""
        return committed_ranges(self.kafka, f"{self.body.group}-{STREAM}")


def committed_records(kafka: KafkaCluster, body: Body, form: str) -> int | None:
    """Return the sum of all committed offsets, or None without any."""
    found = _committed(kafka, body, form)
    return sum(found.values()) if found else None


def stored_partitions(kafka: KafkaCluster, body: Body, form: str) -> int:
    """Return the number of partitions with a committed offset."""
    return len(_committed(kafka, body, form))


def _committed(kafka: KafkaCluster, body: Body, form: str) -> dict[int, int]:
    with suppress(KafkaException):  # the coordinator of a new group has to be found first
        return committed_offsets(
            kafka.client_config(),
            f"{body.group}-{form}",
            body.topic,
            range(body.partitions),
            limit_s=_ASK_LIMIT_S,
        )
    return {}


def wait_for_commits(kafka: KafkaCluster, body: Body, form: str, *, timeout_s: float) -> None:
    first: list[int] = []

    def has_moved() -> bool | None:
        now = committed_records(kafka, body, form)
        if now is not None:
            first.append(now)
        return (bool(first) and first[-1] > first[0]) or None

    wait_until(has_moved, timeout_s=timeout_s, what=f"{body.group}-{form}", interval_s=0.5)


def committed_ranges(kafka: KafkaCluster, group: str) -> list[Committed]:
    """Return all claimed and committed ranges of a group, oldest commit first."""
    return ranges_in(read_stored_offsets(kafka.bootstrap_servers, group))


def ranges_in(stored: Iterable[StoredOffset]) -> list[Committed]:
    """Return the claimed and committed ranges among the stored offsets of a group."""
    open_claims: dict[int, list[tuple[int, int, str, float]]] = defaultdict(list)
    found = []
    for one in stored:
        for start, until, batch_id, since in open_claims[one.partition]:
            if until <= one.offset:
                found.append(Committed(one.partition, until - start, batch_id, since, one.at))
        claims = decode(OffsetAndMetadata(one.offset, one.metadata)).claims
        before = {until: since for _, until, _, since in open_claims[one.partition]}
        open_claims[one.partition] = []
        start = one.offset
        for claim in claims:
            since = before.get(claim.until, one.at)
            open_claims[one.partition].append((start, claim.until, claim.batch_id, since))
            start = claim.until
    return found


def cpu_s(pid: int, thread: int | None = None) -> float:
    """Return the CPU seconds of a process, or of one of its threads."""
    at = Path(f"/proc/{pid}") if thread is None else Path(f"/proc/{pid}/task/{thread}")
    return sum(_ticks(at)[:2]) / os.sysconf("SC_CLK_TCK")


def cpu_with_children_s(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    return sum(_ticks(Path(f"/proc/{pid}"))) / os.sysconf("SC_CLK_TCK")


def _ticks(at: Path) -> tuple[int, ...]:
    """Return the user and system time, and those of ended children."""
    fields = (at / "stat").read_text().rpartition(")")[2].split()
    return tuple(map(int, fields[11:15]))


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@contextmanager
def streaming_run(
    kafka: KafkaCluster, home: Path, body: Body, storage: Mapping[str, object] | None = None
) -> Iterator[ChildProcess]:
    """Run a streaming run from its first stored offset on; it leaves on exit.

    `storage` has the settings of Dagster's storage; the default is SQLite.
    """
    with streaming_runs(kafka, home, body, storage) as (process,):
        yield process


@contextmanager
def streaming_runs(
    kafka: KafkaCluster,
    home: Path,
    body: Body,
    storage: Mapping[str, object] | None = None,
    *,
    runs: int = 1,
) -> Iterator[list[ChildProcess]]:
    """Run streaming runs of one group from its first stored offset on; they leave on exit."""
    home.mkdir(parents=True, exist_ok=True)
    settings = home / "dagster.yaml"
    if not settings.exists():
        settings.write_text(json.dumps({"telemetry": {"enabled": False}, **(storage or {})}))
    with dg.DagsterInstance.from_config(str(home)):
        pass  # it has created the storage, which two runs cannot do at the same time
    execute = [sys.executable, "-m", "dagster", "job", "execute"]
    with ExitStack() as stack:
        processes = []
        for _ in range(runs):
            process = ChildProcess(
                "streaming run",
                [
                    *execute,
                    "-m",
                    PROJECT,
                    "-j",
                    STREAM,
                    "--tags",
                    json.dumps({STREAM_TAG: "bench"}),
                ],
                log=home / "run.log",
                env={
                    "DAGSTER_HOME": str(home),
                    "DAGSTER_DISABLE_TELEMETRY": "1",
                    **body.environment,
                },
                cwd=ROOT,
            )
            stack.callback(process.stop, timeout_s=30, first=signal.SIGTERM)
            processes.append(process)
        wait_until(
            lambda: committed_records(kafka, body, STREAM) is not None or None,
            timeout_s=LIMIT_S,
            what=f"the streaming run of {body.group} to begin",
            interval_s=0.2,
        )
        yield processes


@contextmanager
def loaded_run(
    kafka: KafkaCluster,
    partitions: int,
    *,
    per_second: int,
    storage: Mapping[str, object] | None = None,
    **body: Any,  # noqa: ANN401 - fields of a `Body`
) -> Iterator[Loaded]:
    """Produce to a new topic at a constant rate, and process it with one streaming run."""
    topic = unique_name("streamed")
    kafka.create_topic(topic, partitions)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        home = Path(folder) / "home"
        settings = Body(kafka.bootstrap_servers, topic, partitions, topic, **body)
        with (
            NumberedProducer(
                kafka.bootstrap_servers, topic, partitions=partitions, per_second=per_second
            ),
            streaming_run(kafka, home, settings, storage) as process,
        ):
            yield Loaded(kafka, settings, home, process)
    kafka.delete_topic(topic)


@contextmanager
def dagster_storage(name: str) -> Iterator[dict[str, Any]]:
    """Start a storage of Dagster, `SQLite` or `Postgres`, and yield its settings."""
    if name == SQLITE:
        yield {}
        return
    with Postgres() as postgres:
        postgres.create_database("bench")
        yield postgres.dagster_settings("bench")


@contextmanager
def turned_on(dagster: DagsterDeployment, form: str) -> Iterator[None]:
    """Turn a form's sensor on; on exit all its runs have ended."""
    dagster.ui.start_sensor(LOCATION, f"{form}_sensor")
    yield
    dagster.ui.stop_sensor(LOCATION, f"{form}_sensor")
    with dagster.instance() as instance:

        def live() -> list[dg.DagsterRun]:
            return [run for run in instance.get_runs() if not run.is_finished]

        if form == STREAM:
            for run in live():
                dagster.ui.cancel(run.run_id)
        wait_until(lambda: not live(), timeout_s=LIMIT_S, what="all runs to end", interval_s=0.5)
