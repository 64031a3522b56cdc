"""The story of streaming runs: a second run joins, new code takes over, and one run is killed."""
