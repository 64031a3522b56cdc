"""Dagster runs: queries, heartbeats, cancellation, and proof that a process is gone."""
