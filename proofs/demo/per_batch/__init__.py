"""The story of runs for batches: two members hand partitions over while Spark runs drain."""
