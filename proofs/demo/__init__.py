"""`python -m proofs demo`: play one of two stories on real processes, and verify the output."""
