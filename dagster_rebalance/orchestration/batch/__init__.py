"""`KafkaBatch`, the resource that gives a run its records."""
