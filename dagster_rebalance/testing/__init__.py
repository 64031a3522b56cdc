"""The kit for tests runs a real Kafka and Spark Connect server on this machine, with no container.

It also has pytest fixtures. This package owns everything that starts processes for a test or a
demo. Of the other packages only the CLI imports it, and importing it starts nothing.
"""
