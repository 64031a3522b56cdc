"""Failure scenarios that cross layers: docs/scenarios.md lists them."""
