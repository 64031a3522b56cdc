"""A process that executes one Dagster run, whose asset blocks in Spark, and cancels it.

It cancels the run at the first line of its input, as Dagster does.

Arguments: URL or "local", folder, run id, number of the signal.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import dagster as dg

from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
from tests.spark.slow_write import write_slowly

where, folder, run_id, number = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])


@dg.asset
def slow(spark: KafkaSparkResource) -> None:
    """Block the main thread in a Spark action for minutes."""
    write_slowly(spark.spark_session, folder)


resource = KafkaSparkResource(
    remote=None if where == "local" else where, spark_config={"spark.ui.enabled": "false"}
)


def cancel(instance: dg.DagsterInstance) -> None:
    """Cancel the run in Dagster, and interrupt its process."""
    sys.stdin.readline()
    run = instance.get_run_by_id(run_id)
    assert run is not None
    instance.report_run_canceling(run)
    os.kill(os.getpid(), number)


with dg.DagsterInstance.ephemeral() as instance:
    threading.Thread(target=cancel, args=(instance,), daemon=True).start()
    job = dg.Definitions(
        [slow], resources={"spark": resource}
    ).resolve_implicit_global_asset_job_def()
    result = job.execute_in_process(instance=instance, run_id=run_id, raise_on_error=False)
    run = instance.get_run_by_id(run_id)
    failure = next(event for event in result.all_events if event.is_step_failure).step_failure_data
    print(run.status.value if run else "no run", failure.error_source.name, flush=True)  # noqa: T201 - the test reads it
