"""The same group on a real broker as the consumer's own tests have."""

from __future__ import annotations

from tests.kafka.conftest import group

__all__ = ["group"]
