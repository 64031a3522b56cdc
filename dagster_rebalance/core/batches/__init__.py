"""Batches: planning, settings, progress of a range, and the form for Dagster Pipes."""
