"""Errors that a client reports about its connections and topics, kept to explain missing records.

An oversized response and a quota concern a connection, so no message of a partition reports them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dagster_rebalance.kafka.client.errors import (
    ALL_BROKERS_DOWN,
    UNKNOWN_TOPIC,
    UNPARSABLE,
    error_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from confluent_kafka import KafkaError, Message, ThrottleEvent

    from dagster_rebalance.core.model.offsets import TopicPartition

logger = logging.getLogger(__name__)

NO_REASON = (
    "the client reports no reason; the batch there is damaged, or in a format that it does not know"
)
"""The reason if a client returns no records and has reported no error."""
_VALID_S = 60.0
"""librdkafka repeats an error that lasts every 30 s."""


class ConnectionErrors:
    """The latest error and throttling that one client has reported."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.clear()

    def with_callbacks(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a client, with callbacks that also call the user's callbacks."""
        return {
            **config,
            "error_cb": _both(self._record, config.get("error_cb")),
            "throttle_cb": _both(self._record_throttling, config.get("throttle_cb")),
        }

    def clear(self) -> None:
        """Clear all reports, because the client has made progress."""
        self._last: KafkaError | None = None
        self._recorded_at = float("-inf")
        self._throttled_s = 0.0
        self._throttled_until = float("-inf")

    def take_unparsable(self) -> KafkaError | None:
        """Return the error of a response that the client could not parse, once.

        The client repeats the request.
        """
        last = self._last
        if last is None or last.code() not in UNPARSABLE:
            return None
        self._last = None
        return last

    @property
    def reason(self) -> str:
        """Possible reason for missing records; empty if no error was reported for a minute."""
        now = self._clock()
        if self._last is not None and now < self._recorded_at + _VALID_S:
            return f"{error_text(self._last)} ({self._last.name()})"
        if now < self._throttled_until:
            return (
                f"the broker throttles this client for {self._throttled_s:g} s, because it is "
                "above its quota"
            )
        return ""

    def _record(self, error: KafkaError) -> None:
        # "All brokers down" follows from the previous error, and has less detail.
        if error.code() != ALL_BROKERS_DOWN or self._last is None:
            self._last, self._recorded_at = error, self._clock()

    def _record_throttling(self, event: ThrottleEvent) -> None:
        self._throttled_s = event.throttle_time
        self._throttled_until = self._clock() + event.throttle_time + _VALID_S


class MissingTopics:
    """The missing topics that were reported: a client repeats the error at each refresh."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def is_known(self, message: Message, error: KafkaError) -> bool:
        """Return whether an error only repeats that a topic is missing; log it in that case."""
        topic = message.topic()
        if error.code() not in UNKNOWN_TOPIC or topic is None:
            return False
        is_known = topic in self._known
        self._known.add(topic)
        if is_known:
            logger.info("'%s' is still missing: %s", topic, error_text(error))
        return is_known

    def mark_found(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget the topics of assigned partitions, which exist."""
        self._known.difference_update(tp.topic for tp in partitions)


def _both(
    first: Callable[[Any], None], second: Callable[[Any], None] | None
) -> Callable[[Any], None]:
    def call(report: Any) -> None:  # noqa: ANN401 - an error or an event of the client
        first(report)
        if second is not None:
            second(report)

    return call
