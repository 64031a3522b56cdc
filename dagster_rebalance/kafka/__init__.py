"""The Kafka side: a group member that can delay revokes (KIP-983), and its public consumer.

It needs neither Dagster nor Spark.
"""
