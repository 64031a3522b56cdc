"""`python -m proofs bench`: what a hold, a poll and a mark cost, beside other clients."""
