"""The groups of the test of Dagster Pipes: one of each form of run."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_rebalance import (
    ExternalJobs,
    KafkaBatch,
    KafkaConsumerResource,
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from tests.e2e.project.forms_project import PIPES

ROOT = Path(os.environ["E2E_ROOT"], "pipes")
CHILD = Path(__file__).parent / "pipes_child.py"


class Children(ExternalJobs):
    """The processes on this machine, by the variable with which they were started."""

    look_s = 0.05

    def active(self, run_id: str) -> list[int]:
        """Their ids."""
        return _children(run_id)

    def cancel(self, job: int) -> None:
        """Kill one."""
        with suppress(ProcessLookupError):
            os.kill(job, signal.SIGKILL)

    def stop(self, run_id: str) -> None:
        """Note when they are gone."""
        super().stop(run_id)
        with (ROOT / "journal").open("a") as journal:
            journal.write(f"stopped {run_id}\n")


def _children(run_id: str) -> list[int]:
    wanted = f"CHILD_OF={run_id}".encode()
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdecimal() and wanted in _environment(folder).split(b"\0")
    ]


def _environment(folder: Path) -> bytes:
    with suppress(OSError):  # it has ended
        return (folder / "environ").read_bytes()
    return b""


def _orders(name: str) -> dg.AssetsDefinition:
    @dg.asset(name=f"{name}_orders")
    def orders(
        context: dg.AssetExecutionContext,
        kafka_batch: KafkaBatch,
        pipes: dg.PipesSubprocessClient,
    ) -> dg.MaterializeResult[Any]:
        # What runs on a cluster has no variables of this process: it does not show that the run's
        # process is gone.
        env = {"CHILD_OF": context.run.run_id, "DAGSTER_REBALANCE_RUN": ""}
        return kafka_batch.run_pipes(
            pipes.run,
            context=context,
            command=[sys.executable, str(CHILD)],
            env=env,
            extras={"asset": f"{name}_orders"},
        ).get_materialize_result()

    return orders


def _kafka(name: str) -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
        group_id=name,
        topics=[name],
        dead_letter_topic=f"{name}-dead",
        group_protocol="classic",
        heartbeat_timeout_s=24.0,
        max_wait_s=0,
        retry_delay_s=0.1,
        shutdown_timeout_s=3.0,
        client_config={"session.timeout.ms": "6000"},
    )


defs = dg.Definitions.merge(
    build_kafka_batch_defs(
        kafka=_kafka("pipes_batch"),
        assets=[_orders("pipes_batch")],
        name="pipes_batch",
        kafka_key="pipes_batch_kafka",
        resources={"pipes": PIPES},
        external_work=[Children()],
    ),
    build_kafka_stream_defs(
        kafka=_kafka("pipes_stream"),
        assets=[_orders("pipes_stream")],
        name="pipes_stream",
        kafka_key="pipes_stream_kafka",
        external_work=[Children()],
    ),
)
