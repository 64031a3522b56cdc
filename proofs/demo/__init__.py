"""`python -m proofs demo` plays one of two stories on real parts, and then checks the output."""
