"""The smallest definitions with streaming runs."""

import dagster as dg

from dagster_rebalance import KafkaBatch, KafkaConsumerResource, build_kafka_stream_defs


@dg.asset
def orders(kafka_batch: KafkaBatch) -> dg.MaterializeResult:
    # read kafka_batch.messages(), or kafka_batch.dataframe(spark), and write by range
    return dg.MaterializeResult(metadata={"offsets": kafka_batch.records})


defs = build_kafka_stream_defs(
    kafka=KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"), group_id="shop", topics=["orders"]
    ),
    assets=[orders],
    runs=2,
)
