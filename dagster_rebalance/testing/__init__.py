"""The kit for tests runs a real Kafka and Spark Connect server on this machine, with no container.

It also has pytest fixtures. This package owns everything that starts processes for a test or a
proof. Besides tests, only the CLI and the folder `proofs` import it, and importing it starts
nothing.
"""
