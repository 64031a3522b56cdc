"""Benchmarks of the package beside other clients: `python -m proofs bench`."""
