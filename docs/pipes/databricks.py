"""A batch as a Databricks run, which ends with its Dagster run."""

import dagster as dg
from dagster_databricks import PipesDatabricksClient
from databricks.sdk import WorkspaceClient
from databricks.sdk.service.jobs import BaseRun, SubmitTask

from dagster_rebalance import (
    ExternalJobs,
    KafkaBatch,
    KafkaConsumerResource,
    build_kafka_batch_defs,
)

workspace = WorkspaceClient()
CLUSTER = {
    "spark_version": "17.3.x-scala2.13",
    "node_type_id": "i3.xlarge",
    "num_workers": 4,
    "spark_env_vars": {"KAFKA_SETTINGS": "{{secrets/kafka/settings}}"},
}


@dg.asset
def orders(
    context: dg.AssetExecutionContext, kafka_batch: KafkaBatch, pipes: PipesDatabricksClient
) -> dg.MaterializeResult:
    task = {
        "task_key": "orders",
        "new_cluster": CLUSTER,
        "spark_python_task": {"python_file": "/Workspace/shop/orders_job.py"},
    }
    return pipes.run(
        context=context,
        task=SubmitTask.from_dict(task),
        submit_args={"run_name": f"orders {context.run.run_id}"},
        extras=kafka_batch.pipes_extras(),
    ).get_materialize_result()


class DatabricksRuns(ExternalJobs):
    look_s = 5.0

    def active(self, run_id: str) -> list[BaseRun]:
        active = workspace.jobs.list_runs(active_only=True)
        return [run for run in active if (run.run_name or "").endswith(run_id)]

    def cancel(self, job: BaseRun) -> None:
        workspace.jobs.cancel_run(job.run_id)


defs = build_kafka_batch_defs(
    kafka=KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"), group_id="shop", topics=["orders"]
    ),
    assets=[orders],
    resources={"pipes": PipesDatabricksClient(workspace)},
    external_work=[DatabricksRuns()],
)
