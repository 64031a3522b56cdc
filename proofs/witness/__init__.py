"""What really happened, seen from outside of any member: what was produced, what Kafka stored, what the output has, what Dagster shows."""
