"""Failure scenarios that cross layers: `scenarios.yaml` lists them with their sources."""
