"""Which topics a member takes part for, and when its client is made to look for new ones.

Owns the subscription, and that nothing of it reaches the client during a hold: in the classic
protocol a change of topics or partitions would supersede the hold, without a callback. The caller
must ask for a look between holds only, and not before the rebalance of a release is over: the
client would rejoin in the middle of it. Once, a member that had done so was seen to take no part in
the next rebalance, while the coordinator answered nobody who waited for it (confluent-kafka
2.16.1).
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from dagster_rebalance.kafka.client.errors import (
    NOT_ANSWERED,
    NOT_CONNECTED,
    Attempt,
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
"""How long a list of all topics may take at first. The limit doubles each time it is too short."""
_LONGEST_S = 30.0
_LONGEST_AS_OWNER_S = 8.0
"""Commits, and the request of a revoke, wait for the list."""
_LOOKUP_RETRY_S = 5.0


class Discovery:
    """Keeps one session subscribed to what is wanted and exists.

    Attributes:
        wanted: The topics to take part for, or a pattern; none while the member takes no part.

    Args:
        settings: Validated settings.
        clock: A monotonic clock.
        interval_s: How often to look for new topics and partitions.
        only_visible: Whether to leave out topics that the principal may not see. In the consumer
            protocol, the broker refuses the member for the sake of one such topic.
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
        self._attempt = Attempt(
            f"listing the topics for group '{settings.group_id}'", settings.brokers
        )
        self._is_told = False
        self._settings = settings
        self._clock = clock
        self._interval_s = interval_s
        self.wanted: Collection[str] | re.Pattern[str] = ()
        self._subscribed: frozenset[str] = frozenset()
        self._seen: Collection[str] | re.Pattern[str] = ()
        self._look_at = clock()

    def want(self, subscription: Collection[str] | re.Pattern[str]) -> None:
        """Take part for these topics, from the next look on. May be called by any thread."""
        if subscription != self.wanted:
            self.wanted = subscription
            self._look_at = self._clock()

    def leave_hidden_out(self) -> None:
        """The broker refuses the member for the sake of a topic that the principal may not see."""
        if not self._only_visible:
            self._only_visible = True
            self._look_at = self._clock()

    def look(self, session: SessionView) -> None:
        """Subscribe to the wanted topics, and look for new topics and partitions at intervals.

        Topics that vanish from a pattern stay subscribed to: a list may lack them for a moment. A
        new pattern that matches none gives up those of the one before.
        """
        now = self._clock()
        if now < self._look_at or not self.wanted:
            return
        self._look_at = now + self._interval_s
        wanted = self.wanted
        try:
            topics = self._topics(session, wanted)
        except KafkaException as problem:
            self._look_at = now + min(_LOOKUP_RETRY_S, self._interval_s)
            self._failed(session, kafka_error(problem))
            return
        self._is_told = False
        if topics != self._subscribed and (topics or wanted != self._seen):
            session.subscribe(sorted(topics))
            self._subscribed = topics
        self._seen = wanted

    def _failed(self, session: SessionView, error: KafkaError) -> None:
        """Ask again at once with more time; at the longest limit, report that there is no list."""
        longest_s = _LONGEST_AS_OWNER_S if session.owned else _LONGEST_S
        text = self._attempt.explain(error)
        is_slow = error.code() == NOT_ANSWERED
        # A connection that takes longer than the limit fails like a broker that is away.
        if not is_slow and (error.code() != NOT_CONNECTED or session.owned):
            logger.info("%s; it is tried again", text)
            return
        if self._limit_s < longest_s:
            self._limit_s = min(2 * self._limit_s, longest_s)
            if is_slow:
                self._look_at = self._clock()
            logger.info("%s; it is tried again with %g s", text, self._limit_s)
            return
        logger.warning("%s; no new topics and partitions are found", text)
        if not self._subscribed and not self._is_told:
            self._is_told = True
            session.tell(RequestFailed(broker_error(error, self._attempt)))

    def _listed(self, session: SessionView) -> Mapping[str, TopicMetadata]:
        limit_s = min(self._limit_s, _LONGEST_AS_OWNER_S) if session.owned else self._limit_s
        listed: Mapping[str, TopicMetadata] = session.consumer.list_topics(timeout=limit_s).topics
        return listed

    def _topics(
        self, session: SessionView, wanted: Collection[str] | re.Pattern[str]
    ) -> frozenset[str]:
        if isinstance(wanted, re.Pattern):
            return frozenset(
                name
                for name in self._listed(session)
                if not name.startswith("__") and wanted.fullmatch(name)
            )
        if self._only_visible:
            return frozenset(wanted) & self._listed(session).keys()
        if self._subscribed and self._settings.is_classic:
            # A list of all topics is the one request whose answer makes librdkafka compare its
            # subscription (rd_kafka_metadata: cgrp_update), and rejoin if partitions were added.
            self._listed(session)
        return frozenset(wanted)
