"""Spark's side: a DataFrame over exactly a batch's ranges, output keyed by range, and Spark work that can be found and stopped.

Imports the core and pyspark. Never imports Dagster or a Kafka client: Spark reads Kafka through its own connector, and which offsets are
read is decided elsewhere. Importing this package does not import pyspark, so configuration can be checked where Spark is not installed.
"""
