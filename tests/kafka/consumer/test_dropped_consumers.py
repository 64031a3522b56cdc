"""A consumer that is dropped without `close` leaves its group at once, also after an error."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaError

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.kafka.clients import ScriptedMember
from tests.kafka.consumers import P0, Listener, bug, consumer_of, poll
from tests.kafka.fake_log import fake_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer

FOREIGN = {TopicPartition("foreign", 0): OffsetAndMetadata(1)}


@pytest.fixture(autouse=True)
def _no_search_for_cycles() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def polled(consumer: RebalanceAwareConsumer, polls: int = 3) -> None:
    for _ in range(polls):
        with suppress(DagsterRebalanceError, ValueError):
            consumer.poll(0.1)


def commit_foreign(_group: FakeGroup, consumer: RebalanceAwareConsumer) -> None:
    poll(consumer)
    consumer.commit_sync(FOREIGN)


def silence(group: FakeGroup, consumer: RebalanceAwareConsumer) -> None:
    group.silence(P0)
    polled(consumer)


def silence_for_long(group: FakeGroup, consumer: RebalanceAwareConsumer) -> None:
    group.silence(P0)
    polled(consumer, 600)


def forbid(group: FakeGroup, consumer: RebalanceAwareConsumer) -> None:
    group.forbid("orders")
    polled(consumer)


def read_position(group: FakeGroup, consumer: RebalanceAwareConsumer) -> None:
    poll(consumer)
    group.silence(P0)
    consumer.seek_to_end([P0])
    consumer.position(P0)


def fail_in_listener(_group: FakeGroup, consumer: RebalanceAwareConsumer) -> None:
    consumer.set_rebalance_listener(Listener(assigned=bug))
    consumer.poll(0.1)


@pytest.mark.parametrize(
    "cause",
    [commit_foreign, silence, silence_for_long, forbid, read_position, fail_in_listener],
)
def test_consumer_dropped_after_an_error_is_freed(
    monkeypatch: pytest.MonkeyPatch, cause: Callable[[FakeGroup, RebalanceAwareConsumer], None]
) -> None:
    group = FakeGroup({"orders": 4})
    fake_log(group, monkeypatch, {0: 3})
    consumer = consumer_of(group, fetch=True)
    with suppress(DagsterRebalanceError, ValueError):
        cause(group, consumer)
    seen = weakref.ref(consumer)
    del consumer
    assert seen() is None


def test_consumer_dropped_after_an_error_in_a_client_callback_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_error: KafkaError) -> None:
        msg = "a bug of the user's"
        raise ValueError(msg)

    scene = ScriptedMember(monkeypatch, {"error_cb": fail})
    consumer = consumer_of(FakeGroup({"orders": 4}), member=scene.member)  # type: ignore[arg-type]
    scene.session.call_user("error_cb", KafkaError(KafkaError._TRANSPORT))
    with pytest.raises(ValueError, match="a bug"):
        consumer.poll(5)
    seen = weakref.ref(consumer)
    del consumer
    assert seen() is None
    scene.close()
