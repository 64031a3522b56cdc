"""Witnesses tell what really happened, seen from outside of any member.

They read what was produced, what Kafka stored, what the output has, and what Dagster shows.
"""
