"""The stages of the contract tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from tests.consumer.contract.stages import Actor, FakeStage, KafkaStage, MockCluster, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory


@pytest.fixture(scope="session")
def mock_cluster() -> Iterator[MockCluster]:
    """The mock cluster of librdkafka, for the whole session."""
    cluster = MockCluster()
    yield cluster
    cluster.close()


STAGES = [
    "fake",
    "mock-consumer",
    pytest.param("broker-classic", marks=pytest.mark.broker),
    pytest.param("broker-consumer", marks=pytest.mark.broker),
]

# In the classic protocol the mock waits three seconds before each rebalance, and Python cannot change that: it plays what matters most.
PLAYED_ON_THE_CLASSIC_MOCK = {
    "test_a_single_member_is_assigned_everything",
    "test_held_partitions_stay_assigned_while_polling_goes_on",
    "test_fencing_during_a_hold_is_reported_once_for_each_partition",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Play each test on each stage."""
    if "stage" in metafunc.fixturenames:
        more = ["mock-classic"] if metafunc.function.__name__ in PLAYED_ON_THE_CLASSIC_MOCK else []
        metafunc.parametrize("stage", [*STAGES, *more], indirect=True)


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Stage:
    """A group without members, with a topic of four partitions."""
    where, _, protocol = str(request.param).partition("-")
    if where == "fake":
        return FakeStage()
    if where == "mock":
        mock = cast("MockCluster", request.getfixturevalue("mock_cluster"))
        return KafkaStage(mock.bootstrap_servers, mock.topic(), protocol)
    broker = cast("KafkaCluster", request.getfixturevalue("kafka_broker"))
    topic = cast("TopicFactory", request.getfixturevalue("kafka_topic"))
    return KafkaStage(broker.bootstrap_servers, topic(4), protocol)


@pytest.fixture
def actor(stage: Stage) -> Iterator[Callable[[], Actor]]:
    """Makes members; they have left when the test ends."""
    actors: list[Actor] = []

    def make() -> Actor:
        actors.append(Actor(stage))
        return actors[-1]

    yield make
    for each in actors:
        each.member.close(5.0)
