"""The story of streaming runs: a second one joins, new code takes over, and one is killed."""
