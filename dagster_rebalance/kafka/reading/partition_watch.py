"""Find partitions that silently stop, and topics that were deleted and created again.

A Kafka client may drop a response that it cannot parse without an error. If a topic is recreated,
the client continues in the new log at its position in the old one. Never waits for an answer: the
topic ids are requested in one poll and compared in a later one.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import BrokerError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from dagster_rebalance.core.model.offsets import TopicPartition

    TopicIds = Callable[[], Mapping[str, str] | None]

logger = logging.getLogger(__name__)

STALLED_AFTER_S = 30.0
"""A partition without progress for this long is reported, and again after the same time."""
CHECK_EVERY_S = 5.0
"""The interval between two checks of the positions."""
_TOPIC_IDS_EVERY_S = 5.0


class StalledPartitions:
    """Finds partitions without progress although their logs have more records."""

    def __init__(self, now: float) -> None:
        self._waited: dict[TopicPartition, tuple[int, float]] = {}
        self._checked_at = now

    def is_due(self, now: float) -> bool:
        """Return whether to check the positions again."""
        return now - self._checked_at >= CHECK_EVERY_S

    def check(self, behind: Mapping[TopicPartition, int], now: float) -> frozenset[TopicPartition]:
        """Return the partitions that stay at one offset for too long although their logs have more.

        `behind` has the next offset of each partition whose log has more. Between two checks, at
        most `CHECK_EVERY_S` counts: a partition is not stalled because its caller seldom polls.
        """
        passed = min(now - self._checked_at, CHECK_EVERY_S)
        self._checked_at = now
        before = self._waited
        self._waited = {
            partition: (offset, before[partition][1] + passed)
            if partition in before and before[partition][0] == offset
            else (offset, 0.0)
            for partition, offset in behind.items()
        }
        return frozenset(
            {tp for tp, (_, waited) in self._waited.items() if waited >= STALLED_AFTER_S}
        )

    def restart(self, partitions: Collection[TopicPartition]) -> None:
        """Restart the timers of reported partitions at the next check."""
        for partition in partitions:
            self._waited.pop(partition, None)


class RecreatedTopics:
    """Compares the ids of the topics that are read.

    Args:
        request: Requests topic ids. It returns a function that returns the result, or None.
    """

    def __init__(
        self, request: Callable[[Collection[str]], TopicIds], clock: Callable[[], float]
    ) -> None:
        self._request = request
        self._clock = clock
        self._ids: dict[str, str] = {}
        self._answer: TopicIds | None = None
        self._found: Mapping[str, str] = {}
        self._request_at = -math.inf
        self._begun: set[TopicPartition] = set()
        self._begun_before: set[TopicPartition] = set()

    def add_started(self, partitions: Iterable[TopicPartition]) -> None:
        """Record partitions whose start was looked up, so that it belongs to the current log."""
        self._begun.update(partitions)
        # No generator: an exception of a signal handler inside of one is lost.
        if {tp.topic for tp in self._begun} - self._ids.keys():
            self._request_at = -math.inf

    def check(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, bool]:
        """Return the partitions of recreated topics: True if the position is in the old log.

        The result is the same until `acknowledge`, in case of an interrupt in between.
        """
        if self._answer is None:
            if self._clock() >= self._request_at:
                self._send_request({tp.topic for tp in partitions})
            return {}
        found = self._answer()
        if found is None:
            return {}
        recreated = {
            topic for topic, an_id in found.items() if self._ids.get(topic, an_id) != an_id
        }
        self._found = found
        fresh = self._begun | self._begun_before
        result = {tp: tp not in fresh for tp in partitions if tp.topic in recreated}
        if not result:
            self.acknowledge()
        return result

    def acknowledge(self) -> None:
        """Accept the new ids, once the last result of `check` was handled."""
        self._ids.update(self._found)
        self._answer = None

    def _send_request(self, topics: Collection[str]) -> None:
        self._request_at = self._clock() + _TOPIC_IDS_EVERY_S
        if not topics:
            return
        try:
            self._answer = self._request(topics)
        except BrokerError as problem:
            logger.info("the ids of topics are not known: %s", problem)
            return
        self._begun_before, self._begun = self._begun, set()
        # The partitions of a topic that is no longer read start again if they return.
        self._ids = {topic: an_id for topic, an_id in self._ids.items() if topic in topics}
