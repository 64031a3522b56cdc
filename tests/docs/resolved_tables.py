"""Run the table examples of docs/outputs.md in a local Spark that resolves packages itself.

Argument: a folder. Prints the rows of both tables.
"""

from __future__ import annotations

import sys
from typing import Any

from confluent_kafka import Message

from dagster_rebalance import KafkaBatch, KafkaSparkResource, OffsetRange
from dagster_rebalance.spark.delta_and_iceberg import write_iceberg
from tests.docs.blocks import block_with, run_block

PAGE = "docs/outputs.md"
RANGES = (OffsetRange("orders", 1, 0, 10), OffsetRange("orders", 0, 5, 8))
folder = sys.argv[1]


def pasted(text: str) -> dict[str, Any]:
    """Execute the block with a text, with the folder in place of `/data`, and return its names."""
    names: dict[str, Any] = {"__name__": "pasted"}
    run_block(PAGE, block_with(PAGE, "python", text).replace('"/data', f'"{folder}'), names)
    return names


def batch() -> KafkaBatch:
    """Return a batch of two orders."""
    records = ((0, 5, b'{"id": 1, "item": "pen"}'), (1, 3, b'{"id": 2, "item": "cup"}'))
    messages = [
        Message(topic="orders", partition=partition, offset=offset, value=value)
        for partition, offset, value in records
    ]
    return KafkaBatch.for_testing(RANGES, messages=messages)


if __name__ == "__main__":
    delta, iceberg = pasted("spark.output import write_delta"), pasted("iceberg.spark.SparkCatalog")
    spark = KafkaSparkResource(
        master="local[1]",
        spark_config={
            **delta["spark"].spark_config,
            **iceberg["spark"].spark_config,
            "spark.sql.catalog.lake.type": "hadoop",
            "spark.sql.catalog.lake.warehouse": f"{folder}/warehouse",
            "spark.ui.enabled": "false",
            "spark.databricks.delta.snapshotPartitions": "2",
        },
    )
    delta["orders"](kafka_batch=batch(), spark=spark)
    session = spark.spark_session
    orders = session.sql(f"SELECT offset, id, item FROM delta.`{folder}/orders` ORDER BY ALL")  # noqa: S608
    given = batch()
    write_iceberg(given.dataframe(spark), "lake.shop.orders", given.offset_ranges)
    offsets = session.sql("SELECT offset FROM lake.shop.orders ORDER BY ALL")
    print(list(map(tuple, orders.collect())), [row["offset"] for row in offsets.collect()])  # noqa: T201
    session.stop()
