"""`python -m proofs chaos` does random faults to real parts.

It counts what was lost or doubled, and what stood still.
"""
