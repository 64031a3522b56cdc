"""Groups of readers on a real broker, and of members on the `stage` of a test module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kafka.contract.stages import Actor, Stage, play
from tests.kafka.readers import Readers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory


@pytest.fixture
def group(
    request: pytest.FixtureRequest, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> Iterator[Readers]:
    with Readers(kafka_broker, kafka_topic(4), request.param) as readers:
        yield readers


@pytest.fixture
def actor(stage: Stage) -> Iterator[Callable[[], Actor]]:
    """Creates members, which leave at the end of the test."""
    actors: list[Actor] = []

    def make() -> Actor:
        actors.append(Actor(stage))
        return actors[-1]

    yield make
    for each in actors:
        each.member.close(5.0)


@pytest.fixture
def blue(actor: Callable[[], Actor]) -> Actor:
    """A member that owns all partitions."""
    blue = actor().subscribe()
    play(lambda: blue.owns == blue.everything, blue, what="blue to own everything")
    return blue


@pytest.fixture
def green(blue: Actor, actor: Callable[[], Actor]) -> Actor:
    """A member that waits for two partitions, which `blue` holds."""
    green = actor().subscribe()
    play(lambda: blue.member.held, blue, green, what="a revoke request to blue")
    return green
