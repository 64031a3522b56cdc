"""Runs that work until their process is interrupted, and runs that end at once. No Kafka."""

import os
import time
from pathlib import Path

import dagster as dg

from dagster_rebalance.orchestration.runs.heartbeat import Heartbeat

HEARTBEAT_TIMEOUT_S = 60.0


@dg.op
def work(context: dg.OpExecutionContext) -> None:
    """Give signs of life, and work until an interrupt."""
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
    """A run that works until an interrupt."""
    work()


@dg.job(executor_def=dg.in_process_executor)
def quick() -> None:
    """A run that succeeds if the code server starts it."""
    return_at_once()


defs = dg.Definitions(jobs=[working, quick])
