"""A batch as a pod; see docs/pipes.md."""

import dagster as dg
from dagster_k8s import PipesK8sClient
from kubernetes import client, config

from dagster_rebalance import (
    ExternalJobs,
    KafkaBatch,
    KafkaConsumerResource,
    build_kafka_batch_defs,
)

NAMESPACE = "jobs"
LABEL = "kafka-batch-of"
SETTINGS = {
    "name": "KAFKA_SETTINGS",
    "valueFrom": {"secretKeyRef": {"name": "kafka", "key": "settings"}},
}


@dg.asset
def orders(
    context: dg.AssetExecutionContext, kafka_batch: KafkaBatch, pipes: PipesK8sClient
) -> dg.MaterializeResult:
    return pipes.run(
        context=context,
        image="registry.example.com/orders:1",
        command=["python", "/app/orders_job.py"],
        namespace=NAMESPACE,
        base_pod_meta={"labels": {LABEL: context.run.run_id}},
        base_pod_spec={"containers": [{"env": [SETTINGS]}]},
        extras=kafka_batch.pipes_extras(),
    ).get_materialize_result()


class Pods(ExternalJobs):
    def active(self, run_id: str) -> list[client.V1Pod]:
        config.load_incluster_config()
        found = client.CoreV1Api().list_namespaced_pod(
            NAMESPACE, label_selector=f"{LABEL}={run_id}"
        )
        return found.items

    def cancel(self, job: client.V1Pod) -> None:
        client.CoreV1Api().delete_namespaced_pod(job.metadata.name, NAMESPACE)


defs = build_kafka_batch_defs(
    kafka=KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"), group_id="shop", topics=["orders"]
    ),
    assets=[orders],
    resources={"pipes": PipesK8sClient()},
    external_work=[Pods()],
)
