"""A value of one asset as the parameter of another, and a job downstream of both."""

import dagster as dg

from dagster_rebalance import KafkaBatch, KafkaConsumerResource, build_kafka_batch_defs


@dg.asset
def raw(kafka_batch: KafkaBatch) -> list[str]:
    return [message.value().decode() for message in kafka_batch.messages()]


@dg.asset
def cleaned(kafka_batch: KafkaBatch, raw: list[str]) -> None:
    write_by_range([text.strip() for text in raw], kafka_batch.offset_ranges)


defs = build_kafka_batch_defs(
    kafka=KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"), group_id="shop", topics=["orders"]
    ),
    assets=[raw, cleaned],
    resources={"io_manager": dg.FilesystemIOManager(base_dir="/data/values")},
)


behind = dg.define_asset_job(
    "reports",
    selection=dg.AssetSelection.assets(cleaned).downstream(include_self=False).materializable(),
)
