"""Subscriptions of a session as wanted and existing topics change."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.group_ports import RequestFailed
from dagster_rebalance.kafka.member.topic_discovery import Discovery
from dagster_rebalance.testing.fake_group import ManualClock
from tests.kafka.clients import CONFIG

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.kafka.member.session_view import SessionView

INTERVAL_S = 30.0
ORDERS = re.compile("orders-.*")


class Scene:
    """A discovery whose cluster has the topics of a test, and the events of its session."""

    def __init__(self, *topics: str, only_visible: bool = False) -> None:
        self.topics = set(topics)
        self.subscribed: list[list[str]] = []
        self.owned: frozenset[TopicPartition] = frozenset()
        self.took_s = 0.0
        self.fails_with: int | None = None
        self.limits: list[float] = []
        self.events: list[object] = []
        self._clock = ManualClock()
        self._discovery = Discovery(
            validated(CONFIG, hold_limit_s=10), self._clock, INTERVAL_S, only_visible=only_visible
        )
        self.exclude_invisible = self._discovery.exclude_invisible

    def look(
        self, wanted: Collection[str] | re.Pattern[str], after_s: float = INTERVAL_S
    ) -> list[list[str]]:
        self._clock.advance(after_s)
        self._discovery.set_subscription(wanted)
        self.subscribed.clear()
        self._discovery.refresh(cast("SessionView", self))
        return self.subscribed

    @property
    def consumer(self) -> Any:  # noqa: ANN401 - a part of a client

        def list_topics(timeout: float) -> SimpleNamespace:
            self.limits.append(timeout)
            if self.fails_with is not None:
                raise KafkaException(KafkaError(self.fails_with))
            if self.took_s > timeout:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            return SimpleNamespace(topics=dict.fromkeys(self.topics))

        return SimpleNamespace(list_topics=list_topics)

    def enqueue(self, event: object) -> None:
        self.events.append(event)

    def subscribe(self, topics: list[str]) -> None:
        self.subscribed.append(topics)


def test_new_pattern_without_a_match_unsubscribes_the_last_topics() -> None:
    scene = Scene("orders-eu")
    assert scene.look(ORDERS) == [["orders-eu"]]
    assert scene.look(re.compile("refunds")) == [[]]
    assert scene.look(re.compile("refunds")) == []
    assert scene.look(ORDERS) == [["orders-eu"]]


def test_topics_that_vanish_from_a_pattern_stay_subscribed() -> None:
    scene = Scene("orders-eu")
    scene.look(ORDERS)
    scene.topics.clear()
    assert scene.look(ORDERS) == []
    scene.topics.add("orders-eu")
    assert scene.look(ORDERS) == []


def test_first_pattern_without_a_match_does_not_subscribe() -> None:
    scene = Scene("refunds")
    assert scene.look(ORDERS) == []
    scene.topics.add("orders-eu")
    assert scene.look(ORDERS) == [["orders-eu"]]


def test_topic_list_timeout_doubles() -> None:
    scene = Scene("orders-eu")
    scene.took_s = 9.0
    looks = [list(scene.look(ORDERS, after_s)) for after_s in (INTERVAL_S, 0.0, 0.0, 0.0)]
    assert looks == [[], [], [], [["orders-eu"]]]
    assert scene.limits == [2.0, 4.0, 8.0, 16.0]
    assert scene.events == []


def test_failed_connection_is_reported_without_an_assignment() -> None:
    scene = Scene("orders-eu")
    scene.fails_with = KafkaError._TRANSPORT
    for _ in range(7):
        scene.look(ORDERS)
    assert scene.look(ORDERS, after_s=0.0) == []
    assert scene.limits == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert len(scene.events) == 1


@pytest.mark.parametrize("code", [KafkaError._TRANSPORT, KafkaError._AUTHENTICATION])
def test_topic_list_timeout_of_an_owner_stays_for_an_unavailable_broker(code: int) -> None:
    scene = Scene("orders-eu")
    scene.owned = frozenset({TopicPartition("orders-eu", 0)})
    scene.fails_with = code
    for _ in range(3):
        scene.look(ORDERS)
    assert scene.limits == [2.0] * 3


def test_missing_topic_list_is_reported_once() -> None:
    scene = Scene("orders-eu")
    scene.took_s = 60.0
    for _ in range(7):
        scene.look(ORDERS)
    assert scene.limits[-3:] == [30.0] * 3
    (event,) = scene.events
    assert isinstance(event, RequestFailed)
    assert "listing the topics" in str(event.error)
    assert isinstance(event.error, BrokerError)
    assert event.error.retriable
    scene.took_s = 0.0
    assert scene.look(ORDERS) == [["orders-eu"]]


def test_topic_list_of_an_owner_has_a_lower_limit_and_no_report() -> None:
    scene = Scene("orders-eu")
    scene.look(ORDERS)
    scene.owned = frozenset({TopicPartition("orders-eu", 0)})
    scene.took_s = 60.0
    for _ in range(7):
        scene.look(ORDERS)
    assert scene.limits[-3:] == [8.0] * 3
    assert scene.events == []


def test_invisible_topics_are_excluded_until_visible() -> None:
    scene = Scene("orders-eu", only_visible=True)
    names = ("orders-eu", "orders-us")
    assert scene.look(names) == [["orders-eu"]]
    scene.topics.add("orders-us")
    assert scene.look(names) == [["orders-eu", "orders-us"]]
    scene.topics.clear()
    assert scene.look(names) == []


def test_refusal_for_an_invisible_topic_excludes_it_at_once() -> None:
    scene = Scene("orders-eu")
    names = ("orders-eu", "orders-us")
    assert scene.look(names) == [["orders-eu", "orders-us"]]
    scene.exclude_invisible()
    assert scene.look(names, after_s=0.0) == [["orders-eu"]]
    scene.exclude_invisible()
    assert scene.look(names, after_s=0.0) == []
