"""Resources of Dagster definitions: Kafka, Spark and the schema registry."""
