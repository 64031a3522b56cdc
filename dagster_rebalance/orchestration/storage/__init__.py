"""Data that the package stores in Dagster: run tags, heartbeats, range owners, leases."""
