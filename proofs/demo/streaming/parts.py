"""The processes of the story: Kafka, Dagster, a producer, and Spark if requested."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.deployment import CodeLocation, DagsterDeployment
from dagster_rebalance.testing.local.host import free_port, private_folder
from proofs.demo.streaming.processor import Processor, SparkServer, environment
from proofs.witness.group_log import GroupLog
from proofs.witness.output import json_rows, parquet_rows
from proofs.witness.producer import NumberedProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import dagster as dg

    from proofs.interrupts import Interrupts
    from proofs.witness.output import Row

TOPIC = "orders"
GROUP = "orders"
LOCATION = "shop"
JOB = "kafka_stream"
SENSOR = "kafka_stream_sensor"
PARTITIONS = 8
SESSION_TIMEOUT_S = 5
"""Kafka's default is 45 s. In production, a machine that stalls briefly would lose its partitions
with such a short timeout."""
_PROJECT = Path(__file__).parent / "project"


@dataclass(frozen=True)
class Parts:
    """The running processes.

    Attributes:
        kafka: The broker.
        spark: The Spark Connect server or the cluster, if the runs use Spark.
        dagster: The deployment.
        instance: Its instance.
        producer: Produces while it is entered.
        log: The group's records in Kafka.
        code: The deployed code of the asset.
        folder: Folder of the demo, with logs.
    """

    kafka: KafkaCluster
    spark: SparkServer | None
    dagster: DagsterDeployment
    instance: dg.DagsterInstance
    producer: NumberedProducer
    log: GroupLog
    code: Path
    folder: Path

    def rows(self) -> Iterator[Row]:
        """Return the output, which is Parquet with Spark and JSON lines without."""
        return (parquet_rows if self.spark else json_rows)(self.folder / "orders")

    @property
    def logs(self) -> list[Path]:
        spark = self.spark.logs if self.spark else []
        return [*self.dagster.home.glob("*.log"), *self.kafka.logs, *spark]

    def scale_to(self, runs: int) -> None:
        """Set the number of streaming runs, and reload the code location."""
        self.code.with_name("runs").write_text(str(runs))
        self.dagster.ui.reload(LOCATION)

    def deploy(self, before: str, after: str) -> None:
        """Deploy code with a change in one place."""
        self.code.write_text(self.code.read_text().replace(before, after))
        self.dagster.ui.reload(LOCATION)


class _Startable(Protocol):
    def start(self) -> object: ...

    def stop(self) -> None: ...


@contextmanager
def all_parts(
    *,
    protocol: str,
    records_per_second: int,
    processor: Processor,
    step: Callable[[str], None],
    interrupts: Interrupts,
) -> Iterator[Parts]:
    """Start all processes.

    Args:
        protocol: The group protocol.
        records_per_second: Rate of the producer.
        processor: The processor of the runs.
        step: Receives a sentence before each start.
        interrupts: Ended first in the shutdown.

    Raises:
        DagsterRebalanceError: A process did not start; the message includes the end of its log.
    """
    folder = private_folder("demo")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            session_ms = str(SESSION_TIMEOUT_S * 1000)
            # The port is chosen here: the config of Dagster is written before Kafka is up.
            port = free_port()
            kafka = KafkaCluster(
                port=port, settings={"group.consumer.session.timeout.ms": session_ms}, tell=step
            )
            spark = processor.server(step)
            code = _project(folder / LOCATION, with_spark=spark is not None)
            env = {
                "KAFKA_BROKERS": f"127.0.0.1:{port}",
                "KAFKA_GROUP": GROUP,
                "KAFKA_TOPIC": TOPIC,
                "KAFKA_GROUP_PROTOCOL": protocol,
                "KAFKA_CLIENT_CONFIG": json.dumps(
                    {"session.timeout.ms": session_ms, "heartbeat.interval.ms": "1000"}
                    if protocol == "classic"
                    else {}
                ),
                "ORDERS_PATH": str(folder / "orders"),
                **environment(spark),
            }
            location = CodeLocation(LOCATION, code.stem, code.parent, env, reloads=True)
            dagster = DagsterDeployment(folder / "home", [location])
            step(
                "starting Kafka, Dagster (webserver, daemon, code location)"
                + (f" and {processor.value}" if spark else "")
            )
            start_together(stack, [kafka, dagster, *([spark] if spark else [])], interrupts)
            kafka.create_topic(TOPIC, PARTITIONS)
            yield Parts(
                kafka=kafka,
                spark=spark,
                dagster=dagster,
                instance=stack.enter_context(dagster.instance()),
                producer=NumberedProducer(
                    kafka.bootstrap_servers,
                    TOPIC,
                    partitions=PARTITIONS,
                    per_second=records_per_second,
                ),
                log=stack.enter_context(GroupLog(kafka.bootstrap_servers, GROUP)),
                code=code,
                folder=folder,
            )
        finally:
            interrupts.end()


def _project(folder: Path, *, with_spark: bool) -> Path:
    """Copy the deployed code, which the demo changes."""
    folder.mkdir()
    code = folder / "orders.py"
    shutil.copy(_PROJECT / ("orders_with_spark.py" if with_spark else "orders.py"), code)
    (folder / "runs").write_text("1")
    return code


def start_together(stack: ExitStack, parts: Sequence[_Startable], interrupts: Interrupts) -> None:
    """Start servers concurrently; the stack stops them.

    Raises:
        DagsterRebalanceError: One of them did not start.
    """
    for part in parts:
        stack.callback(part.stop)
    threads = ThreadPoolExecutor(len(parts))
    # Before the first one is stopped it waits for all of them, also when one fails, or a person
    # interrupts this: none may start after it was stopped.
    stack.callback(threads.shutdown)
    with interrupts.deferred():  # the pool would lose a thread that is just starting
        starts = [threads.submit(part.start) for part in parts]
    for start in starts:
        start.result()
