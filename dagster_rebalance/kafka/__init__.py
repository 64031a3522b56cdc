"""The Kafka side: a group member that can delay its revokes, and a consumer-aware listener.

KIP-983 describes the delayed revoke, and KAFKA-20385 the listener that receives the consumer.

The package imports the core and confluent_kafka, and neither dagster nor pyspark: anyone can do
with `RebalanceAwareConsumer` whatever the Dagster side does.
"""
