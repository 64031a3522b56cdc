"""Requests of operators: which ranges to rerun, and which offsets may be reset."""
