"""Tests of the Dagster side."""
