"""The pure core: every decision of the package, without input or output.

The core decides which member may write the offset of a partition, what a hold waits for, and what a
claim contains. It must never import dagster, confluent_kafka or pyspark, read a clock, sleep, or
access a file or a socket.
"""
