"""A process that executes one Dagster run, which is the driver of an application on a cluster.

Its asset copies one partition of a topic in two batches, the second one for minutes. Arguments: the
master's URL, the session's settings as JSON, the brokers, the topic, its number of records, and the
folder.
"""

from __future__ import annotations

import json
import sys

import dagster as dg

from dagster_rebalance import OffsetRange
from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
from dagster_rebalance.spark.output import write_parquet_by_range
from dagster_rebalance.spark.ranges import read_ranges

url, settings, brokers, topic, count, folder = sys.argv[1:]


@dg.asset
def copied(spark: KafkaSparkResource) -> None:
    half = int(count) // 2
    for range_, ms in (
        (OffsetRange(topic, 0, 0, half), 0),
        (OffsetRange(topic, 0, half, 2 * half), 5_000),
    ):
        frame = read_ranges(spark.spark_session, [range_], {"bootstrap.servers": brokers})
        work = f"java_method('java.lang.Thread', 'sleep', bigint({ms}) + offset * 0)"
        write_parquet_by_range(frame.selectExpr("*", f"{work} AS slept"), folder)


resource = KafkaSparkResource(master=url, spark_config=json.loads(settings))
dg.materialize([copied], resources={"spark": resource})
