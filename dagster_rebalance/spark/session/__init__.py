"""Spark sessions: the connector, their start, and the interruption of their work."""
