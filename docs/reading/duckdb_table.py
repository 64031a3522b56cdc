"""A DuckDB table from which each range is replaced in one transaction."""

import dagster as dg
import duckdb

from dagster_rebalance import KafkaBatch


@dg.asset
def orders(kafka_batch: KafkaBatch) -> dg.MaterializeResult:
    written = 0
    with duckdb.connect("/data/shop.duckdb") as shop:
        shop.execute("CREATE TABLE IF NOT EXISTS orders (batch_range TEXT, body JSON)")
        for range_ in kafka_batch.offset_ranges:
            records = kafka_batch.arrow(range_).read_all()
            shop.begin()
            shop.execute("DELETE FROM orders WHERE batch_range = ?", [range_.key])
            shop.execute("INSERT INTO orders SELECT ?, decode(value) FROM records", [range_.key])
            shop.commit()
            written += records.num_rows
    return dg.MaterializeResult(metadata=kafka_batch.metadata(row_count=written))
