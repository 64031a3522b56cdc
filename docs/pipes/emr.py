"""A batch as a job of EMR Serverless; see docs/pipes.md."""

import boto3
import dagster as dg
from dagster_aws.pipes import PipesEMRServerlessClient

from dagster_rebalance import (
    ExternalJobs,
    KafkaBatch,
    KafkaConsumerResource,
    build_kafka_batch_defs,
)

emr = boto3.client("emr-serverless", region_name="eu-central-1")
APPLICATION = "00f1abcdexample"
ROLE = "arn:aws:iam::123456789012:role/orders"
ACTIVE = ["SUBMITTED", "QUEUED", "PENDING", "SCHEDULED", "RUNNING", "CANCELLING"]


@dg.asset
def orders(
    context: dg.AssetExecutionContext, kafka_batch: KafkaBatch, pipes: PipesEMRServerlessClient
) -> dg.MaterializeResult:
    start = {
        "applicationId": APPLICATION,
        "executionRoleArn": ROLE,
        "name": f"orders {context.run.run_id}",
        "jobDriver": {"sparkSubmit": {"entryPoint": "s3://shop/orders_job.py"}},
        "configurationOverrides": {
            "monitoringConfiguration": {"cloudWatchLoggingConfiguration": {"enabled": True}}
        },
    }
    return pipes.run(
        context=context, start_job_run_params=start, extras=kafka_batch.pipes_extras()
    ).get_materialize_result()


class EmrJobs(ExternalJobs):
    def active(self, run_id: str) -> list[dict]:
        pages = emr.get_paginator("list_job_runs").paginate(
            applicationId=APPLICATION, states=ACTIVE
        )
        jobs = [job for page in pages for job in page["jobRuns"]]
        return [job for job in jobs if job.get("name", "").endswith(run_id)]

    def cancel(self, job: dict) -> None:
        if job["state"] != "CANCELLING":
            emr.cancel_job_run(applicationId=APPLICATION, jobRunId=job["id"])


defs = build_kafka_batch_defs(
    kafka=KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"), group_id="shop", topics=["orders"]
    ),
    assets=[orders],
    resources={"pipes": PipesEMRServerlessClient(client=emr)},
    external_work=[EmrJobs()],
)
