"""The stages of the contract tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from tests.kafka.contract.stages import FakeStage, KafkaStage, MockCluster, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    pytest.param("broker-classic", marks=pytest.mark.broker),
    pytest.param("broker-consumer", marks=pytest.mark.broker),
]

# The mock takes three seconds for each rebalance, so it runs the most important tests only. It
# stores metadata of any length, so probes do not work where nothing is committed.
PLAYED_ON_THE_MOCK = {
    "test_single_member_is_assigned_all_partitions": ("mock-classic", "mock-consumer"),
    "test_held_partitions_stay_assigned_while_polling": ("mock-classic", "mock-consumer"),
    "test_probe_detects_fencing_during_a_hold": (
        "mock-classic",
        "mock-consumer",
    ),
    "test_release_hands_the_held_partitions_over": ("mock-consumer",),
    "test_metadata_of_a_commit_is_read_back": ("mock-consumer",),
    "test_new_pattern_without_a_match_revokes_the_old_topics": (
        "mock-classic",
        "mock-consumer",
    ),
    "test_close_before_the_first_assignment_is_quick": ("mock-consumer",),
    "test_offsets_of_several_requests_are_all_stored": ("mock-classic", "mock-consumer"),
    "test_metadata_above_the_request_size_is_refused_for_its_partition": (
        "mock-classic",
        "mock-consumer",
    ),
}


# The strategy range is eager: a hold covers all partitions.
PLAYED_EAGERLY = {
    "test_fenced_member_rejoins",
    "test_probe_detects_fencing_during_a_hold",
    "test_close_during_a_hold_revokes_all_partitions",
    "test_unsubscribe_during_a_hold_leaves_the_group",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Play each test on each stage."""
    if "actor" in metafunc.fixturenames:
        name = metafunc.function.__name__
        eager = [pytest.param("broker-range", marks=pytest.mark.broker)] * (name in PLAYED_EAGERLY)
        metafunc.parametrize(
            "stage", [*STAGES, *eager, *PLAYED_ON_THE_MOCK.get(name, ())], indirect=True
        )


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
    return KafkaStage(broker.bootstrap_servers, topic(4), protocol, broker)
