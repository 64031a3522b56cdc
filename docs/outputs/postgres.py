"""A Postgres table in which each range is replaced in one transaction."""

import os
from contextlib import closing

import dagster as dg
import psycopg2
from psycopg2.extras import execute_values

from dagster_rebalance import KafkaBatch

LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
DELETE = """
    DELETE FROM orders
    WHERE topic = %s AND partition = %s AND "offset" >= %s AND "offset" < %s
"""
INSERT = 'INSERT INTO orders (topic, partition, "offset", body) VALUES %s'


@dg.asset
def orders(kafka_batch: KafkaBatch) -> dg.MaterializeResult:
    written = 0
    with closing(psycopg2.connect(os.environ["SHOP_DATABASE"])) as shop, shop, shop.cursor() as at:
        for range_ in sorted(kafka_batch.offset_ranges):
            at.execute(LOCK, [str(range_.topic_partition)])
            at.execute(DELETE, [range_.topic, range_.partition, range_.start, range_.until])
            rows = [
                (record.topic(), record.partition(), record.offset(), record.value().decode())
                for record in kafka_batch.messages(range_)
            ]
            execute_values(at, INSERT, rows)
            written += len(rows)
    return dg.MaterializeResult(metadata=kafka_batch.metadata(row_count=written))
