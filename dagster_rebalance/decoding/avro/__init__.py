"""Avro payloads as columns."""
