"""Streaming runs: claims, the worker, and the number of replicas."""
