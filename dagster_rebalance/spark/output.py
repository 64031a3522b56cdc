"""Output keyed by range: writing a range again replaces what was written for it, so a replay never doubles a record.

Owns the layout `topic=/partition=/range_start=/range_until=` and how it is written. Never deletes what belongs to another range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.errors import IllegalStateError
from dagster_rebalance.spark.ranges import explained_read_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RANGE_KEY = ("topic", "partition", "range_start", "range_until")


def write_parquet_by_range(frame: DataFrame, path: str) -> None:
    """Write records to Parquet so that each range replaces its own earlier output and touches no other.

    Runs may write to the same path at the same time, as long as their ranges differ. A range of which no record is left (all were filtered
    out) replaces nothing: keep what is filtered out a function of the record alone, so that a replay gives the same records.

    Args:
        frame: What became of the DataFrame of `read_ranges`, with its columns `topic`, `partition`, `range_start` and `range_until`.
        path: Of a local file system, HDFS or an object store that Spark knows.

    Raises:
        IllegalStateError: One of these columns is missing.
        BrokerError: Kafka no longer has all of the offsets.
    """
    missing = [column for column in RANGE_KEY if column not in frame.columns]
    if missing:
        msg = (
            f"the output cannot be keyed by range: the column(s) {', '.join(missing)} of read_ranges() are missing. "
            "Keep them in the DataFrame."
        )
        raise IllegalStateError(msg)
    writer = frame.write.mode("overwrite").option("partitionOverwriteMode", "dynamic").partitionBy(*RANGE_KEY)
    with explained_read_errors():
        writer.parquet(path)
