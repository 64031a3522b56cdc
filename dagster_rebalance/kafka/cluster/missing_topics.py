"""Which topics are missing, as a client tells it: once for each, however often it finds out.

Owns what is news. Must never hide another error than that a topic does not exist.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dagster_rebalance.kafka.client.errors import UNKNOWN_TOPIC, said

if TYPE_CHECKING:
    from collections.abc import Iterable

    from confluent_kafka import KafkaError, Message

    from dagster_rebalance.core.model.offsets import TopicPartition

logger = logging.getLogger(__name__)


class MissingTopics:
    """The topics that the caller knows to be missing."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def is_known(self, message: Message, error: KafkaError) -> bool:
        """Return whether an error only repeats that a topic is missing; log it then."""
        topic = message.topic()
        if error.code() not in UNKNOWN_TOPIC or topic is None:
            return False
        is_known = topic in self._known
        self._known.add(topic)
        if is_known:
            logger.info("'%s' is still missing: %s", topic, said(error))
        return is_known

    def found(self, partitions: Iterable[TopicPartition]) -> None:
        """Partitions are assigned, so their topics exist."""
        self._known.difference_update(tp.topic for tp in partitions)
