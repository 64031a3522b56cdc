"""Keep the client subscribed to the wanted topics, and let it find new topics and partitions.

Only between holds: in the classic protocol, a change of topics during a hold would supersede it
without a callback, and one during the rebalance of a release makes the client rejoin in the middle.
A member then once took no part in the next rebalance, and the group waited for it (2.16.1).
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from dagster_rebalance.kafka.client.errors import (
    NOT_ANSWERED,
    NOT_CONNECTED,
    Operation,
    broker_error,
    kafka_error,
)
from dagster_rebalance.kafka.group_ports import RequestFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from confluent_kafka import KafkaError
    from confluent_kafka.admin import TopicMetadata

    from dagster_rebalance.kafka.client.settings import Settings
    from dagster_rebalance.kafka.member.session_view import SessionView

logger = logging.getLogger(__name__)

_LIMIT_S = 2.0
"""The first limit for a list of all topics. It doubles each time it is too short."""
_LONGEST_S = 30.0
_LONGEST_AS_OWNER_S = 8.0
"""Commits and revoke requests wait for the list."""
_RETRY_S = 5.0


class Discovery:
    """Keeps one session subscribed to the wanted topics that exist.

    With `only_visible`, topics that the principal may not see are left out: in the consumer
    protocol, the broker refuses a member that subscribes to such a topic.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float],
        interval_s: float,
        *,
        only_visible: bool = False,
    ) -> None:
        self._only_visible = only_visible
        self._limit_s = _LIMIT_S
        self._operation = Operation(
            f"listing the topics for group '{settings.group_id}'", settings.brokers
        )
        self._is_reported = False
        self._settings = settings
        self._clock = clock
        self._interval_s = interval_s
        self.subscription: Collection[str] | re.Pattern[str] = ()
        self._subscribed: frozenset[str] = frozenset()
        self._subscribed_for: Collection[str] | re.Pattern[str] = ()
        self._refresh_at = clock()

    def set_subscription(self, subscription: Collection[str] | re.Pattern[str]) -> None:
        """Subscribe to these topics at the next refresh. Thread-safe."""
        if subscription != self.subscription:
            self.subscription = subscription
            self._refresh_at = self._clock()

    def exclude_invisible(self) -> None:
        """Leave out topics that the principal may not see: the broker refuses the member."""
        if not self._only_visible:
            self._only_visible = True
            self._refresh_at = self._clock()

    def refresh(self, session: SessionView) -> None:
        """Subscribe to the wanted topics, and discover new topics and partitions at intervals.

        Topics that no longer match a pattern stay subscribed: a list may lack them for a moment. A
        new pattern without a match unsubscribes the topics of the last pattern.
        """
        now = self._clock()
        if now < self._refresh_at or not self.subscription:
            return
        self._refresh_at = now + self._interval_s
        subscription = self.subscription
        try:
            topics = self._topics(session, subscription)
        except KafkaException as problem:
            self._refresh_at = now + min(_RETRY_S, self._interval_s)
            self._handle_failure(session, kafka_error(problem))
            return
        self._is_reported = False
        if topics != self._subscribed and (topics or subscription != self._subscribed_for):
            session.subscribe(sorted(topics))
            self._subscribed = topics
        self._subscribed_for = subscription

    def _handle_failure(self, session: SessionView, error: KafkaError) -> None:
        """Retry at once with a longer time limit; report a failure at the longest limit."""
        longest_s = _LONGEST_AS_OWNER_S if session.owned else _LONGEST_S
        text = self._operation.explain(error)
        is_slow = error.code() == NOT_ANSWERED
        # A connection that takes longer than the limit fails like an unavailable broker.
        if not is_slow and (error.code() != NOT_CONNECTED or session.owned):
            logger.info("%s; it is retried", text)
            return
        if self._limit_s < longest_s:
            self._limit_s = min(2 * self._limit_s, longest_s)
            if is_slow:
                self._refresh_at = self._clock()
            logger.info("%s; it is retried with %g s", text, self._limit_s)
            return
        logger.warning("%s; no new topics and partitions are found", text)
        if not self._subscribed and not self._is_reported:
            self._is_reported = True
            session.enqueue(RequestFailed(broker_error(error, self._operation)))

    def _list_topics(self, session: SessionView) -> Mapping[str, TopicMetadata]:
        limit_s = min(self._limit_s, _LONGEST_AS_OWNER_S) if session.owned else self._limit_s
        topics: Mapping[str, TopicMetadata] = session.consumer.list_topics(timeout=limit_s).topics
        return topics

    def _topics(
        self, session: SessionView, subscription: Collection[str] | re.Pattern[str]
    ) -> frozenset[str]:
        if isinstance(subscription, re.Pattern):
            return frozenset(
                name
                for name in self._list_topics(session)
                if not name.startswith("__") and subscription.fullmatch(name)
            )
        if self._only_visible:
            return frozenset(subscription) & self._list_topics(session).keys()
        if self._subscribed and self._settings.is_classic:
            # Only the answer to a list of all topics makes librdkafka compare its subscription
            # (rd_kafka_metadata: cgrp_update), and rejoin if partitions were added.
            self._list_topics(session)
        return frozenset(subscription)
