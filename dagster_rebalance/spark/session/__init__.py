"""Spark sessions: the connector, the start, and jobs that can be interrupted."""
