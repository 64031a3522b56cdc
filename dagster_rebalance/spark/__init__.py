"""Spark: DataFrames over exact offset ranges, output by range, and sessions that can be stopped.

It imports the core, `decoding` and pyspark, but neither Dagster nor a Kafka client: Spark reads
Kafka through its own connector. Importing this package does not import pyspark, so configuration
can be checked where Spark is not installed.
"""
