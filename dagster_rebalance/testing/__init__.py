"""The kit for tests: a real Kafka, a Spark Connect server and pytest fixtures, on this machine, with no container.

Owns everything that starts processes for a test or a demo. Nothing in the package imports it, and importing it starts nothing.
"""
