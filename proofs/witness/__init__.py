"""Independent readers of the produced records, of Kafka, of the output and of Dagster."""
