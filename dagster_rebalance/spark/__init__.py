"""Spark: DataFrames over exact offset ranges, output by range, and sessions that can be stopped.

This package imports the core, `decoding` and pyspark, but neither Dagster nor a Kafka client: Spark
reads Kafka through its own connector. An import of this package does not import pyspark, so the
configuration can be checked without an installed Spark.
"""
