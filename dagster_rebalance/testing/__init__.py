"""The test kit: real Kafka, Spark, Postgres and Dagster processes, and an in-memory group.

Its import starts nothing. Besides tests, only `cli` and the repository's `proofs` import it.
"""
