"""Output by range from Arrow, the public names. The other modules implement them."""

from dagster_rebalance.arrow.delta import write_delta
from dagster_rebalance.arrow.iceberg import write_iceberg
from dagster_rebalance.arrow.parquet import write_parquet_by_range
from dagster_rebalance.arrow.postgres import write_postgres

__all__ = ["write_delta", "write_iceberg", "write_parquet_by_range", "write_postgres"]
