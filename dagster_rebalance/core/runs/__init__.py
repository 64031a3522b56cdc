"""Runs and what they mean for a batch: progress, retries, liveness, the start check."""
