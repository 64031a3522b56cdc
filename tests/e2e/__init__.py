"""Whole deployments: a real Kafka, a real Dagster."""
