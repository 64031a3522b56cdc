"""A group on a real broker, for the tests that play it in several protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kafka.readers import Readers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory


@pytest.fixture
def group(
    request: pytest.FixtureRequest, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> Iterator[Readers]:
    with Readers(kafka_broker, kafka_topic(4), request.param) as readers:
        yield readers
