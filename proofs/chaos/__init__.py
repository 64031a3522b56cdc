"""`python -m proofs chaos`: faults by random draw on real parts, and a count of what was lost, doubled or stood still."""
