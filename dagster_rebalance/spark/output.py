"""Output by range, the public names: `write_parquet_by_range`, `write_delta` and `write_iceberg`.

`parquet` and `delta_and_iceberg` implement them.
"""

from dagster_rebalance.spark.delta_and_iceberg import write_delta, write_iceberg
from dagster_rebalance.spark.parquet import RANGE_KEY, write_parquet_by_range

__all__ = ["RANGE_KEY", "write_delta", "write_iceberg", "write_parquet_by_range"]
