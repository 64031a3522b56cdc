"""Tests of the Kafka side."""
