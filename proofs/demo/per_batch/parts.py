"""The processes of the story: Kafka, Spark Connect, Dagster with two code locations, a producer."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import dagster_rebalance
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.deployment import CodeLocation, DagsterDeployment
from dagster_rebalance.testing.local.host import private_folder
from dagster_rebalance.testing.spark_connect import SparkConnectServer
from proofs.witness.producer import NumberedProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import dagster as dg

    from proofs.interrupts import Interrupts

TOPIC = "orders"
GROUP = "orders"
SENSOR = "kafka_batches_sensor"
PARTITIONS = 8
BLUE, GREEN = "blue", "green"

WORK_S = (2, 2, 12, 2, 2, 2, 12, 2)
"""Seconds of simulated work: some moving and some retained partitions are slow."""

SETTINGS = {
    "run_coordinator": {
        "module": "dagster.core.run_coordinator",
        "class": "QueuedRunCoordinator",
        # Runs are launched beside the sensors: a launch takes seconds, in which no other sensor
        # would tick.
        "config": {
            "max_concurrent_runs": 8,
            "dequeue_interval_seconds": 1,
            "dequeue_use_threads": True,
            "dequeue_num_workers": 2,
        },
    }
}


@dataclass(frozen=True)
class Parts:
    """The running processes.

    Attributes:
        kafka: The broker.
        spark: The Spark Connect server.
        dagster: The deployment.
        instance: Its instance.
        producer: The running producer.
        output: Folder of the Parquet output.
        folder: Folder of the demo, with logs.
    """

    kafka: KafkaCluster
    spark: SparkConnectServer
    dagster: DagsterDeployment
    instance: dg.DagsterInstance
    producer: NumberedProducer
    output: Path
    folder: Path

    @property
    def partitions(self) -> list[str]:
        return [f"{TOPIC}-{number}" for number in range(PARTITIONS)]

    def sensor_page(self) -> str:
        """The UI's page of the remaining sensor."""
        return f"{self.dagster.ui.url}/locations/__repository__@{GREEN}/sensors/{SENSOR}"

    def asset_page(self, which: str) -> str:
        """Return the UI's page of the group's `offsets` or `group` asset."""
        return f"{self.dagster.ui.url}/assets/kafka/{GROUP}/{which}?view=events"


@contextmanager
def all_parts(
    *,
    protocol: str,
    records_per_second: int,
    step: Callable[[str], None],
    interrupts: Interrupts,
) -> Iterator[Parts]:
    """Start all processes in order.

    Args:
        protocol: The group protocol.
        records_per_second: Rate of the producer.
        step: Receives a sentence before each start.
        interrupts: Ended first in the shutdown.

    Raises:
        DagsterRebalanceError: A process did not start; the message includes the end of its log.
    """
    project = _example_project()
    folder = private_folder("demo")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            step("starting Kafka")
            kafka = stack.enter_context(KafkaCluster(tell=step))
            kafka.create_topic(TOPIC, PARTITIONS)
            step("starting a Spark Connect server")
            spark = stack.enter_context(SparkConnectServer(tell=step))
            step("starting Dagster: webserver, daemon, and the code locations blue and green")
            env = {
                "KAFKA_BROKERS": kafka.bootstrap_servers,
                "KAFKA_GROUP": GROUP,
                "KAFKA_TOPIC": TOPIC,
                "KAFKA_GROUP_PROTOCOL": protocol,
                "SPARK_CONNECT_URL": spark.remote,
                "ORDERS_PATH": str(folder / "orders"),
                "SIMULATED_WORK_S": ",".join(map(str, WORK_S)),
            }
            locations = [
                CodeLocation(name, "example_project.definitions", project / "src", env)
                for name in (BLUE, GREEN)
            ]
            dagster = stack.enter_context(
                DagsterDeployment(folder / "home", locations, settings=SETTINGS)
            )
            instance = stack.enter_context(dagster.instance())
            producer = NumberedProducer(
                kafka.bootstrap_servers, TOPIC, partitions=PARTITIONS, per_second=records_per_second
            )
            stack.enter_context(producer)
            yield Parts(kafka, spark, dagster, instance, producer, folder / "orders", folder)
        finally:
            interrupts.end()


def _example_project() -> Path:
    project = Path(dagster_rebalance.__file__).parents[1] / "example_project"
    if not (project / "pyproject.toml").exists():
        msg = (
            f"The demo runs the example project, which is not at {project}: "
            "run it from a checkout of dagster-rebalance."
        )
        raise ConfigurationError(msg)
    return project
