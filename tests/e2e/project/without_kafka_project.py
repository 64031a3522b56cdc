"""Jobs that work until an interrupt or end at once, and sensors that fail or skip. No Kafka."""

import os
import time
from pathlib import Path

import dagster as dg

from dagster_rebalance.orchestration.runs.heartbeat import Heartbeat

HEARTBEAT_TIMEOUT_S = 60.0


@dg.op
def work(context: dg.OpExecutionContext) -> None:
    """Give heartbeats, and work until an interrupt."""
    heartbeat = Heartbeat(context.instance, context.run, timeout_s=HEARTBEAT_TIMEOUT_S)
    heartbeat.begin()
    with heartbeat:
        Path(os.environ["DAGSTER_HOME"], context.run_id).touch()
        while True:
            time.sleep(0.1)


@dg.op
def return_at_once() -> None:
    """Do nothing."""


@dg.job(executor_def=dg.in_process_executor)
def working() -> None:
    """Work until an interrupt."""
    work()


@dg.job(executor_def=dg.in_process_executor)
def quick() -> None:
    """A run that succeeds if the code server starts it."""
    return_at_once()


@dg.sensor(job=quick, minimum_interval_seconds=1)
def failing_sensor() -> dg.SkipReason:
    """Fail, as a tick with a missing setting."""
    msg = "KAFKA_BROKERS is not set"
    raise KeyError(msg)


@dg.sensor(job=quick, minimum_interval_seconds=1)
def skipping_sensor() -> dg.SkipReason:
    """Skip."""
    return dg.SkipReason("nothing to do")


defs = dg.Definitions(jobs=[working, quick], sensors=[failing_sensor, skipping_sensor])
