"""Output keyed by range in Parquet files, Delta Lake and Iceberg."""
