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

from dagster_rebalance.consumer.kafka_errors import kafka_error, said

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dagster_rebalance.consumer.session_view import SessionView
    from dagster_rebalance.consumer.settings import Settings

logger = logging.getLogger(__name__)

_LOOKUP_TIMEOUT_S = 2.0
_LOOKUP_RETRY_S = 5.0


class Discovery:
    """Keeps one session subscribed to what is wanted and exists.

    Attributes:
        wanted: The topics to take part for, or a pattern; none while the member takes no part.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float], interval_s: float) -> None:
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
            logger.info(
                "group '%s': listing topics failed: %s",
                self._settings.group_id,
                said(kafka_error(problem)),
            )
            self._look_at = now + min(_LOOKUP_RETRY_S, self._interval_s)
            return
        if topics != self._subscribed and (topics or wanted != self._seen):
            session.subscribe(sorted(topics))
            self._subscribed = topics
        self._seen = wanted

    def _topics(
        self, session: SessionView, wanted: Collection[str] | re.Pattern[str]
    ) -> frozenset[str]:
        if isinstance(wanted, re.Pattern):
            listed = session.consumer.list_topics(timeout=_LOOKUP_TIMEOUT_S).topics
            return frozenset(
                name for name in listed if not name.startswith("__") and wanted.fullmatch(name)
            )
        if self._subscribed and self._settings.is_classic:
            # A list of all topics is the one request whose answer makes librdkafka compare its
            # subscription (rd_kafka_metadata: cgrp_update), and rejoin if partitions were added.
            session.consumer.list_topics(timeout=_LOOKUP_TIMEOUT_S)
        return frozenset(wanted)
