"""Clients of librdkafka: settings, credentials, errors, and conversions of types."""
