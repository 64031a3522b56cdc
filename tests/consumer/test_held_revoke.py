"""The one trick that holds rest on, and what the session makes of unusual callbacks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import confluent_kafka
import pytest

from dagster_rebalance.consumer import held_revoke
from dagster_rebalance.consumer.events import LostReason, PartitionsAssigned
from dagster_rebalance.consumer.session import Session
from dagster_rebalance.consumer.settings import validated
from dagster_rebalance.core.errors import IllegalStateError
from dagster_rebalance.core.partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator

P0 = TopicPartition("orders", 0)
GRANTED = confluent_kafka.TopicPartition("orders", 0)


class CarelessConsumer(confluent_kafka.Consumer):
    """A client that accepts the unassign of anything."""

    def incremental_unassign(self, partitions: list[confluent_kafka.TopicPartition]) -> None:
        """Nothing is wrong with it."""


@pytest.fixture
def session() -> Iterator[Session]:
    """A session whose broker nobody can reach."""
    made = Session(validated({"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"}, hold_limit_s=10), time.monotonic)
    yield made
    made.leave()
    made.wait(5.0)
    assert not made.is_leaving


def test_a_client_that_behaves_otherwise_is_refused_loudly() -> None:
    """It would unassign by itself after the callback, and give the partitions away in the middle of a drain."""
    careless = CarelessConsumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"})
    with pytest.raises(IllegalStateError, match=f"confluent-kafka {confluent_kafka.__version__} .* a revoke cannot be held"):
        held_revoke.suppress_unassign(careless)


def test_the_installed_client_refuses_the_unassign_of_an_unknown_partition() -> None:
    """Which is what makes it believe that the application has unassigned by itself."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"})
    held_revoke.suppress_unassign(consumer)
    consumer.close()


def test_a_revoke_of_nothing_holds_nothing(session: Session) -> None:
    """There would never be anything to release."""
    session._on_revoke(session.consumer, [])
    assert session.hold is None
    assert session.take() == []


def test_a_partition_that_is_granted_twice_does_not_raise_out_of_poll(session: Session) -> None:
    """The client would answer _CONFLICT (seen after a superseded hold)."""
    session._on_assign(session.consumer, [GRANTED])
    session._on_assign(session.consumer, [GRANTED])
    assert session.take() == [PartitionsAssigned((P0,)), PartitionsAssigned(())]
    assert session.owned == {P0}


def test_any_assignment_ends_an_eager_hold() -> None:
    """An eager member is assigned nothing before it has answered, so another rebalance has overtaken the hold."""
    config = {"bootstrap.servers": "127.0.0.1:1", "group.id": "etl", "group.protocol": "classic", "partition.assignment.strategy": "range"}
    session = Session(validated(config, hold_limit_s=10), time.monotonic)
    session._on_assign(session.consumer, [GRANTED])
    session._on_revoke(session.consumer, [GRANTED])
    session._on_assign(session.consumer, [confluent_kafka.TopicPartition("orders", 1)])
    assert session.ended is LostReason.SUPERSEDED
    session.leave()
    session.wait(5.0)
    assert not session.is_leaving


def test_a_held_partition_that_is_granted_again_ends_the_session(session: Session) -> None:
    """Another rebalance has overtaken the hold."""
    session._on_assign(session.consumer, [GRANTED])
    session._on_revoke(session.consumer, [GRANTED])
    assert session.hold is not None
    session._on_assign(session.consumer, [GRANTED])
    assert session.ended is not None
