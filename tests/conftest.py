"""Common fixtures of all tests, and their order: quick tests first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from dagster_rebalance.testing.local.java import SHORT_LIVED
from tests.issuer import KafkaWithTokens

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["dagster_rebalance.testing.fixtures"]

# Spark's scripts read these.
for variable in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS", "SPARK_DAEMON_JAVA_OPTS"):
    os.environ.setdefault(variable, " ".join(SHORT_LIVED))

# No result depends on the load of the machine.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def kafka_with_tokens() -> Iterator[KafkaWithTokens]:
    """A real Kafka that accepts passwords, and the tokens of a running issuer."""
    with KafkaWithTokens() as kafka, kafka.issuer.served(kafka.key_and_certificate()):
        yield kafka


REAL_PARTS = ("e2e", "spark", "broker", "postgres", "package")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests without real parts first, then the longest ones, to balance the workers."""
    items.sort(
        key=lambda item: min(
            (
                REAL_PARTS.index(mark.name) + 1
                for mark in item.iter_markers()
                if mark.name in REAL_PARTS
            ),
            default=0,
        )
    )
