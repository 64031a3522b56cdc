"""Verify with the leaders that their logs still reach offsets of earlier leader epochs (KIP-320).

After an unclean election and new records, the bounds of a truncated log look unchanged. librdkafka
has no call for OffsetsForLeaderEpoch, but its consumer sends it before it reads from a position
with a leader epoch: a record, or the end, verifies it, and an error refutes it. 1,000 partitions
take 0.1 to 0.2 s (2.16.1, three brokers, with and without a backlog).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import confluent_kafka
from confluent_kafka import KafkaError

from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.client.confluent import create_client, to_commit, to_confluent
from dagster_rebalance.kafka.client.defaults import ClientKind
from dagster_rebalance.kafka.client.errors import (
    END_OF_PARTITION,
    LOG_TRUNCATION,
    OFFSET_RESET_FORBIDDEN,
    Operation,
    broker_error,
    is_transient,
    is_unreadable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from confluent_kafka import Message

    from dagster_rebalance.core.model.offsets import LogPosition
    from dagster_rebalance.kafka.client.settings import Settings

_MOST_AT_ONCE = 500
_WAIT_S = 0.1
_TRUNCATED = KafkaError(LOG_TRUNCATION).str()
"""The client reports a forbidden reset, with librdkafka's text for a truncation in it."""


def find_truncated(
    settings: Settings,
    positions: Mapping[TopicPartition, LogPosition],
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[TopicPartition, bool]:
    """Return whether the log no longer reaches each position.

    The result omits partitions whose leaders do not answer in time.
    """
    if not positions:
        return {}
    consumer = create_client(confluent_kafka.Consumer, settings.connection(ClientKind.LOG_CHECK))
    found: dict[TopicPartition, bool] = {}
    try:
        consumer.assign(
            [
                to_commit(partition, OffsetAndMetadata(at.offset, leader_epoch=at.leader_epoch))
                for partition, at in positions.items()
            ]
        )
        deadline = clock() + timeout_s
        while len(found) < len(positions) and clock() < deadline:
            fresh: dict[TopicPartition, bool] = {}
            most = min(len(positions) - len(found), _MOST_AT_ONCE)
            for message in consumer.consume(most, _WAIT_S):
                answer = _answer(message, settings)
                partition = TopicPartition(str(message.topic()), int(message.partition() or 0))
                if answer is not None and partition not in found:
                    fresh.setdefault(partition, answer)
            # Records after these positions would delay the answers of other partitions.
            consumer.incremental_unassign([to_confluent(partition) for partition in fresh])
            found |= fresh
    finally:
        consumer.close()
    return found


def is_truncation(error: KafkaError) -> bool:
    """Return whether a client found that the log was truncated below its assigned position."""
    return error.code() == OFFSET_RESET_FORBIDDEN and _TRUNCATED in error.str()


def _answer(message: Message, settings: Settings) -> bool | None:
    error = message.error()
    if error is None or error.code() == END_OF_PARTITION:
        return False
    if error.code() == OFFSET_RESET_FORBIDDEN:
        # Any other position is out of range now, as the bounds will show.
        return is_truncation(error) or None
    topic = message.topic()
    if topic is not None and is_unreadable(message, error):
        return False  # the client fetches a position only after the leader verified it
    if is_transient(error):
        return None
    raise broker_error(
        error,
        Operation("verifying the leader epochs of committed offsets", settings.brokers),
        () if topic is None else [TopicPartition(topic, int(message.partition() or 0))],
    )
