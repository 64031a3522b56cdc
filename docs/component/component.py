"""The component as Python."""

import dagster as dg

from dagster_rebalance import KafkaBatch, KafkaBatchComponent, KafkaConsumerResource


@dg.component_instance
def load(context: dg.ComponentLoadContext) -> KafkaBatchComponent:
    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> dg.MaterializeResult:
        return dg.MaterializeResult(metadata=kafka_batch.metadata())

    return KafkaBatchComponent(
        kafka=KafkaConsumerResource(
            bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"), group_id="orders", topics=["orders"]
        ),
        assets=[orders],
    )
