"""`python -m proofs demo`: two members hand partitions over while Spark runs drain, and the output is checked."""
