"""The test kit: real Kafka, Spark, Postgres and Dagster as processes, and a group in memory.

Importing it starts nothing. Besides tests, only `cli` and `proofs` import it.
"""
