"""Output by range: Parquet files, and tables of Delta Lake and Iceberg."""
