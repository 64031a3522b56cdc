"""Output by range from Arrow, without Spark: Parquet files and tables.

An import of this package imports neither pyarrow nor a library of a table format: each is an extra.
"""
