"""A client leaves with no callback left to call.

A callback inside of its `close()` can freeze the process (librdkafka #4884).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import confluent_kafka
import pytest

from dagster_rebalance.core.model.events import LostReason, PartitionsLost
from dagster_rebalance.kafka.member.leave import leave
from tests.kafka.contract.stages import Actor, KafkaStage, play

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

CONFIG = {"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"}


class WatchedConsumer(confluent_kafka.Consumer):
    """A client that notes which callbacks come while it is closed."""

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(dict(config))
        self.is_closing = False
        self.called_in_close: list[str] = []

    def subscribe(self, topics: list[str], **callbacks: Callable[..., None]) -> None:  # type: ignore[override]
        super().subscribe(
            topics, **{name: self._noted(name, callback) for name, callback in callbacks.items()}
        )

    def close(self) -> None:
        self.is_closing = True
        super().close()

    def _noted(self, name: str, callback: Callable[..., None]) -> Callable[..., None]:
        def note(
            consumer: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]
        ) -> None:
            if self.is_closing:
                self.called_in_close.append(name)
            callback(consumer, partitions)

        return note


class ThrowingConsumer(WatchedConsumer):
    """A client with a callback of the user's that raises out of each poll."""

    def poll(self, timeout: float = -1) -> None:
        msg = "the user's statistics callback"
        raise ValueError(msg)


class DeafConsumer(WatchedConsumer):
    """A client that refuses to give anything up."""

    def unsubscribe(self) -> None:
        raise confluent_kafka.KafkaException(
            confluent_kafka.KafkaError(confluent_kafka.KafkaError._FATAL)
        )


@pytest.fixture(params=["classic", "consumer", "range"])
def stage(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    kafka_broker: KafkaCluster,
    kafka_topic: TopicFactory,
) -> Iterator[KafkaStage]:
    """A group whose members must leave without a callback in `close`."""
    clients: list[WatchedConsumer] = []

    def make(config: Mapping[str, object]) -> WatchedConsumer:
        clients.append(WatchedConsumer(config))
        return clients[-1]

    monkeypatch.setattr(confluent_kafka, "Consumer", make)
    made = KafkaStage(kafka_broker.bootstrap_servers, kafka_topic(4), request.param)
    if made.protocol == "classic":
        # Longer than anything here waits: members leave, and do not just vanish.
        made.config["session.timeout.ms"] = "30000"
    yield made
    assert {client.is_closing for client in clients} == {True}
    assert [called for client in clients for called in client.called_in_close] == []


def green_owns_everything(green: Actor) -> bool:
    if green.member.held:
        green.member.release()
    return len(green.owns) == 4


@pytest.mark.broker
def test_close_in_a_hold_leaves_no_callback(blue: Actor, green: Actor) -> None:
    blue.member.close(5.0)
    play(lambda: green_owns_everything(green), green, what="the second member to own everything")


@pytest.mark.broker
def test_close_after_a_release_leaves_no_callback(blue: Actor, green: Actor) -> None:
    """Two callbacks are due, which can freeze a close."""
    blue.member.release()
    blue.member.close(5.0)
    play(lambda: green_owns_everything(green), green, what="the second member to own everything")


@pytest.mark.broker
def test_rejoin_after_fencing_in_a_hold_leaves_no_callback(blue: Actor, green: Actor) -> None:
    blue.stage.evict(blue.member)
    play(lambda: blue.partitions_of(PartitionsLost), blue, green, what="the loss to be noticed")
    assert [event.reason for event in blue.events if isinstance(event, PartitionsLost)] == [
        LostReason.FENCED
    ]
    blue.member.close(5.0)
    play(lambda: green_owns_everything(green), green, what="the second member to own everything")


def test_leave_closes_the_client_if_a_user_callback_raises() -> None:
    client = ThrowingConsumer(CONFIG)
    leave(client)
    assert client.is_closing


def test_leave_closes_the_client_if_unassign_fails(caplog: pytest.LogCaptureFixture) -> None:
    client = DeafConsumer(CONFIG)
    leave(client)
    assert client.is_closing
    assert "without unassigning first" in caplog.text
