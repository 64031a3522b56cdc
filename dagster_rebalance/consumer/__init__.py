"""The Kafka side: a consumer-group member whose revokes can be delayed (KIP-983), and a listener that is given the consumer (KAFKA-20385).

Imports the core and confluent_kafka, nothing else. It knows nothing of Dagster or Spark: whatever the Dagster side does, anyone can do with
`RebalanceAwareConsumer`.
"""
