"""The story of per-batch runs: two members hand partitions over while Spark runs drain."""
