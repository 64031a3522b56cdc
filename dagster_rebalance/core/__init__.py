"""The pure core: what to do on a rebalance, decided without any input or output.

Owns every decision of the package: who may write a partition's offset, what a hold waits for, what
a claim says. Must never import dagster, confluent_kafka or pyspark, read a clock, sleep, or touch a
file or a socket.
"""
