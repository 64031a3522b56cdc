"""The processes under test: three brokers, Dagster with three members, a producer, and Spark.

Each member is a process: a code location, or a streaming run of one code location.
"""

from __future__ import annotations

import csv
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.deployment import CodeLocation, DagsterDeployment
from dagster_rebalance.testing.local.host import private_folder
from dagster_rebalance.testing.postgres import Postgres
from dagster_rebalance.testing.spark_connect import (
    DELTA_LAKE,
    ICEBERG,
    SparkConnectServer,
    table_settings,
)
from proofs.chaos.bystander import Bystander, wait_for_writes
from proofs.chaos.exchange import (
    BAD_VARIABLE,
    BROKERS_VARIABLE,
    DATABASE_VARIABLE,
    FLEETING,
    FOLDER_VARIABLE,
    GROUP,
    LETTERS,
    PARTITIONS_VARIABLE,
    PROTOCOL_VARIABLE,
    ROLE_VARIABLE,
    RUNS,
    SINK_VARIABLE,
    SPARK_VARIABLE,
    STREAMING,
    TOPIC,
    Exchange,
)
from proofs.chaos.fleeting import LOCATION as AMBER
from proofs.chaos.fleeting import Fleeting
from proofs.chaos.sinks import CREATE, Sink
from proofs.witness.output import Row, parquet_rows, table_rows
from proofs.witness.producer import NumberedProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import dagster as dg

    from proofs.chaos.bad import Bad

PARTITIONS = 6
LETTER_PARTITIONS = 2
RECORDS_PER_SECOND = 60
BROKERS = (1, 2, 3)
RELOADED = "purple"
MEMBERS = ("blue", "green", RELOADED)
STREAMS = RELOADED
"""The only code location with streaming runs, each of which is a member."""

DATABASE = "dagster"
_NUMBERS = "numbers"

TICK_LIMIT_S = 15
# A run takes 3 s of CPU to start. With more of them at once, two cores would have no time for the
# members, which is no stall of theirs.
_RUNS_AT_ONCE = 3
# A deploy starts the new ones beside the old ones.
_STREAMING_RUNS_AT_ONCE = 3 * RUNS


def _settings(*, is_streaming: bool) -> dict[str, Any]:
    return {
        "sensors": {"use_threads": True, "num_workers": 4},
        "run_launcher": {"module": "proofs.chaos.launcher", "class": "RefusingLauncher"},
        "run_coordinator": {
            "module": "dagster.core.run_coordinator",
            "class": "QueuedRunCoordinator",
            "config": {
                "max_concurrent_runs": _STREAMING_RUNS_AT_ONCE if is_streaming else _RUNS_AT_ONCE,
                "dequeue_interval_seconds": 1,
                "dequeue_use_threads": True,
                "dequeue_num_workers": 2,
            },
        },
    }


def _spark_for(sink: Sink, output: Path, step: Callable[[str], None]) -> SparkConnectServer:
    if sink is Sink.PARQUET:
        return SparkConnectServer(tell=step)
    libraries, settings = (DELTA_LAKE, ICEBERG), table_settings(output)
    return SparkConnectServer(libraries=libraries, settings=settings, tell=step)


def _database(server: Postgres) -> str:
    """Create a database with the table of numbers. Return its URL."""
    server.create_database(_NUMBERS)
    url = f"postgresql://dagster@127.0.0.1:{server.port}/{_NUMBERS}"
    with psycopg.connect(url) as connection:
        connection.execute(CREATE)
    return url


def member_of(run_id: str) -> str:
    """Return the catalogue's name of the member in a streaming run."""
    return f"{STREAMS}/{run_id[:8]}"


@dataclass(frozen=True)
class Parts:
    """The running processes.

    Attributes:
        kafka: Three brokers.
        dagster: The deployment.
        instance: Its instance.
        producer: The running producer.
        bystander: The running bystander.
        exchange: The folder shared with the runs.
        fleeting: The second group; None with streaming runs.
        spark: The Spark Connect server, if runs use Spark.
        sink: The output; None for files without Spark and Arrow.
        database: The URL of the output's database, if the output is in Postgres.
        postgres: The server of Dagster's storage; None with SQLite.
        protocol: The group protocol.
        partitions: Initial number of partitions.
        is_streaming: Whether streaming runs are the members.
        bad: How the asset treats bad records, if any are bad.
    """

    kafka: KafkaCluster
    dagster: DagsterDeployment
    instance: dg.DagsterInstance
    producer: NumberedProducer
    bystander: Bystander
    exchange: Exchange
    fleeting: Fleeting | None
    spark: SparkConnectServer | None
    sink: Sink | None
    database: str
    postgres: Postgres | None
    protocol: str
    partitions: int
    is_streaming: bool
    bad: Bad | None

    @property
    def locations(self) -> list[str]:
        """The code locations with members of the group."""
        return [name for name in self.dagster.locations if name != AMBER]

    @property
    def member_logs(self) -> list[Path]:
        """The log files of the members."""
        return [self.dagster.locations[name].server.log for name in self.locations]

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the output."""
        output = self.exchange.output
        if self.sink in {Sink.PARQUET, Sink.ARROW_PARQUET}:
            yield from parquet_rows(output)
        elif self.sink is not None and self.spark is not None:
            yield from table_rows(self.spark.remote, self.sink.table(output))
        elif self.sink is not None:
            yield from (Row(*row) for row in self.sink.arrow_rows(output, self.database))
        else:
            for path in output.glob("*.csv"):
                with path.open(newline="") as file:
                    yield from (Row(*map(int, row)) for row in csv.reader(file))

    @property
    def logs(self) -> list[Path]:
        """All log files."""
        return [
            *self.dagster.home.glob("*.log"),
            *self.kafka.logs,
            *([self.spark.process.log] if self.spark else []),
            *([self.postgres.server.log] if self.postgres else []),
        ]


@contextmanager
def all_parts(
    *,
    protocol: str,
    partitions: int,
    is_streaming: bool,
    sink: Sink | None,
    with_postgres: bool,
    bad: Bad | None,
    step: Callable[[str], None],
    at_end: Callable[[], None],
) -> Iterator[Parts]:
    """Start all processes in order.

    Args:
        protocol: The group protocol.
        partitions: Initial number of partitions.
        is_streaming: Whether streaming runs of one code location are the members.
        sink: The output; None for files without Spark and Arrow.
        with_postgres: Whether Dagster's storage is Postgres instead of SQLite.
        bad: How the asset treats bad records; None if no record is bad.
        step: Receives a sentence before each start.
        at_end: Called first in the shutdown.

    Raises:
        DagsterRebalanceError: A process did not start; the message includes the end of its log.
    """
    folder = private_folder("chaos")
    exchange = Exchange(folder)
    exchange.make()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            step("starting three brokers")
            kafka = stack.enter_context(KafkaCluster(nodes=len(BROKERS), tell=step))
            kafka.create_topic(TOPIC, partitions)
            env = {
                FOLDER_VARIABLE: str(folder),
                BROKERS_VARIABLE: kafka.bootstrap_servers,
                PROTOCOL_VARIABLE: protocol,
                PARTITIONS_VARIABLE: str(partitions),
            }
            if bad is not None:
                kafka.create_topic(LETTERS, LETTER_PARTITIONS)
                env[BAD_VARIABLE] = bad.value
            spark = None
            database = ""
            if sink is not None:
                env[SINK_VARIABLE] = sink.value
            if sink is Sink.ARROW_POSTGRES:
                step("starting Postgres for the output")
                database = _database(stack.enter_context(Postgres()))
                env[DATABASE_VARIABLE] = database
            if sink is not None and not sink.is_of_arrow:
                step("starting a Spark Connect server")
                spark = stack.enter_context(_spark_for(sink, exchange.output, step))
                env[SPARK_VARIABLE] = spark.remote
            postgres = None
            if with_postgres:
                step("starting Postgres")
                postgres = stack.enter_context(Postgres())
                postgres.create_database(DATABASE)
            storage = postgres.dagster_settings(DATABASE) if postgres is not None else {}
            roles = (
                {STREAMS: STREAMING}
                if is_streaming
                else {**dict.fromkeys(MEMBERS, ""), AMBER: FLEETING}
            )
            step(f"starting Dagster: webserver, daemon, and the code locations {', '.join(roles)}")
            locations = [
                CodeLocation(
                    name,
                    "proofs.chaos.project",
                    folder,
                    {**env, ROLE_VARIABLE: role},
                    reloads=name == RELOADED,
                )
                for name, role in roles.items()
            ]
            limits = {
                "DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS": str(TICK_LIMIT_S),
                FOLDER_VARIABLE: str(folder),
            }
            dagster = stack.enter_context(
                DagsterDeployment(
                    folder / "home",
                    locations,
                    settings={**_settings(is_streaming=is_streaming), **storage},
                    env=limits,
                )
            )
            instance = stack.enter_context(dagster.instance())
            producer = NumberedProducer(
                kafka.bootstrap_servers, TOPIC, partitions=partitions, per_second=RECORDS_PER_SECOND
            )
            stack.enter_context(producer)
            runs = RunLedger(instance, GROUP)
            bystander = stack.enter_context(
                Bystander(
                    partial(_ask_as_members_do, runs, None if with_postgres else folder / "home")
                )
            )
            fleeting = None if is_streaming else Fleeting(kafka, dagster, exchange)
            yield Parts(
                kafka,
                dagster,
                instance,
                producer,
                bystander,
                exchange,
                fleeting,
                spark,
                sink,
                database,
                postgres,
                protocol,
                partitions,
                is_streaming,
                bad,
            )
        finally:
            at_end()


def _ask_as_members_do(runs: RunLedger, home: Path | None) -> None:
    """Read runs, and wait until SQLite allows a write; `home` is its folder, if any."""
    runs.read((), with_live=True)
    if home is not None:
        wait_for_writes(home)
