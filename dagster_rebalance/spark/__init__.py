"""Spark's side reads exactly a batch's ranges into a DataFrame and writes output keyed by range.

It also makes Spark work that can be found and stopped. It imports the core and pyspark. It never
imports Dagster or a Kafka client: Spark reads Kafka through its own connector, and other packages
decide which offsets it reads. Importing this package does not import pyspark, so it can check
configuration where Spark is not installed.
"""
