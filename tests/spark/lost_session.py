"""A process whose run uses Spark once per line of its input, and prints the result.

Arguments: URL, run id.
"""

from __future__ import annotations

import sys

import dagster as dg

from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource

remote, run_id = sys.argv[1:]


@dg.asset
def batches(spark: KafkaSparkResource) -> None:
    """Work on several batches in one process, as a streaming run does."""
    for _ in sys.stdin:
        try:
            result = str(spark.spark_session.range(3).count())
        except Exception as error:  # noqa: BLE001 - the test compares it
            result = str(error).splitlines()[0]
        print(result, flush=True)  # noqa: T201 - the test reads it


with dg.DagsterInstance.ephemeral() as instance:
    job = dg.Definitions(
        [batches], resources={"spark": KafkaSparkResource(remote=remote)}
    ).resolve_implicit_global_asset_job_def()
    job.execute_in_process(instance=instance, run_id=run_id)
