"""Which topics a session is made to subscribe to when what is wanted or what exists changes."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from dagster_rebalance.consumer.discovery import Discovery
from dagster_rebalance.consumer.settings import validated
from dagster_rebalance.testing.fake_group import ManualClock
from tests.consumer.clients import CONFIG

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.consumer.session_view import SessionView

INTERVAL_S = 30.0
ORDERS = re.compile("orders-.*")


class Scene:
    """A discovery whose cluster has what a test says, and what its session was told."""

    def __init__(self, *topics: str) -> None:
        self.topics = set(topics)
        self.subscribed: list[list[str]] = []
        self._clock = ManualClock()
        self._discovery = Discovery(validated(CONFIG, hold_limit_s=10), self._clock, INTERVAL_S)

    def look(self, wanted: Collection[str] | re.Pattern[str]) -> list[list[str]]:
        """What follows from a look that is due."""
        self._clock.advance(INTERVAL_S)
        self._discovery.want(wanted)
        self.subscribed.clear()
        self._discovery.look(cast("SessionView", self))
        return self.subscribed

    @property
    def consumer(self) -> Any:  # noqa: ANN401 - what a discovery uses of a client
        """A client that lists the topics."""
        listed = SimpleNamespace(topics=dict.fromkeys(self.topics))
        return SimpleNamespace(list_topics=lambda **_: listed)

    def subscribe(self, topics: list[str]) -> None:
        """Note it."""
        self.subscribed.append(topics)


def test_a_new_pattern_that_matches_nothing_gives_the_topics_before_up() -> None:
    """Once; and it subscribes to what matches later."""
    scene = Scene("orders-eu")
    assert scene.look(ORDERS) == [["orders-eu"]]
    assert scene.look(re.compile("refunds")) == [[]]
    assert scene.look(re.compile("refunds")) == []
    assert scene.look(ORDERS) == [["orders-eu"]]


def test_topics_that_vanish_from_a_pattern_stay_subscribed_to() -> None:
    """A list that lacks them for a moment must not take their partitions."""
    scene = Scene("orders-eu")
    scene.look(ORDERS)
    scene.topics.clear()
    assert scene.look(ORDERS) == []
    scene.topics.add("orders-eu")
    assert scene.look(ORDERS) == []


def test_a_pattern_that_matched_nothing_from_the_beginning_subscribes_to_nothing() -> None:
    """There is nothing to give up."""
    scene = Scene("refunds")
    assert scene.look(ORDERS) == []
    scene.topics.add("orders-eu")
    assert scene.look(ORDERS) == [["orders-eu"]]
