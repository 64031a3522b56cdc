"""An op that processes the range of a dead letter."""

import dagster as dg

from dagster_rebalance import KafkaConsumerResource, KafkaSparkResource
from dagster_rebalance.orchestration.reporting.dead_letters import dead_lettered_range
from dagster_rebalance.spark.output import write_parquet_by_range
from dagster_rebalance.spark.ranges import read_ranges


@dg.op
def process_again(
    context, kafka: KafkaConsumerResource, spark: KafkaSparkResource, letter: str
) -> None:
    missing = dead_lettered_range(context.instance, kafka, letter)
    frame = read_ranges(spark.spark_session, [missing], kafka.spark_options())
    write_parquet_by_range(frame, "/data/orders")
