"""One Parquet file per range, written with Polars."""

import uuid
from pathlib import Path

import dagster as dg
import polars as pl

from dagster_rebalance import KafkaBatch, KafkaConsumerResource, build_kafka_batch_defs

FOLDER = Path("/data/orders")
ORDER = pl.Struct({"id": pl.Int64, "item": pl.String})


@dg.asset
def orders(kafka_batch: KafkaBatch) -> dg.MaterializeResult:
    written = 0
    for range_ in kafka_batch.offset_ranges:
        records = pl.DataFrame(kafka_batch.arrow(range_).read_all())
        bodies = records["value"].cast(pl.String).str.json_decode(ORDER)
        staged = FOLDER / f".{range_.key}.{uuid.uuid4()}"
        bodies.struct.unnest().write_parquet(staged)
        staged.replace(FOLDER / f"{range_.key}.parquet")
        written += len(bodies)
    return dg.MaterializeResult(metadata=kafka_batch.metadata(row_count=written))


defs = build_kafka_batch_defs(
    kafka=KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"), group_id="shop", topics=["orders"]
    ),
    assets=[orders],
)
