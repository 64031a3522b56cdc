"""Leaders tell whether their logs still reach an offset of an earlier leader epoch (KIP-320).

An unclean election cuts a log off; once it has grown again, its bounds look as if nothing had
happened. Only the leader knows at which offset each epoch ended. librdkafka has no call for that
question (OffsetsForLeaderEpoch), but its consumer asks it before it reads from a position with a
leader epoch: the first record, or the end, means yes, and an error means no. Measured with
confluent-kafka 2.16.1 and three brokers: 1,000 partitions in 0.1 to 0.2 s, with and without a
backlog.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import confluent_kafka
from confluent_kafka import KafkaError

from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.client.defaults import ClientKind
from dagster_rebalance.kafka.client.errors import (
    END_OF_PARTITION,
    LOG_TRUNCATION,
    OFFSET_RESET_FORBIDDEN,
    Attempt,
    broker_error,
    is_passing,
    is_unreadable,
)
from dagster_rebalance.kafka.client.factory import made
from dagster_rebalance.kafka.client.types import theirs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from confluent_kafka import Message

    from dagster_rebalance.core.model.offsets import LogPosition
    from dagster_rebalance.kafka.client.settings import Settings

_MOST_AT_ONCE = 500
_WAIT_S = 0.1
_TRUNCATED = KafkaError(LOG_TRUNCATION).str()
"""The error itself is the one of a reset that the settings forbid; the text that librdkafka has for
a truncation is in it."""


def ask_leaders(
    settings: Settings,
    positions: Mapping[TopicPartition, LogPosition],
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[TopicPartition, bool]:
    """Tell whether the log no longer reaches each position.

    The answer lacks partitions whose leaders do not answer in time.

    Raises:
        BrokerError: Kafka refuses, and waiting would not help.
    """
    if not positions:
        return {}
    consumer = _consumer(settings)
    found: dict[TopicPartition, bool] = {}
    try:
        consumer.assign([_at(partition, position) for partition, position in positions.items()])
        deadline = clock() + timeout_s
        while len(found) < len(positions) and clock() < deadline:
            fresh: dict[TopicPartition, bool] = {}
            most = min(len(positions) - len(found), _MOST_AT_ONCE)
            for message in consumer.consume(most, _WAIT_S):
                answer = _answer(message, settings)
                partition = TopicPartition(str(message.topic()), int(message.partition() or 0))
                if answer is not None and partition not in found:
                    fresh.setdefault(partition, answer)
            # Else the records behind a position would be fetched, too, instead of other answers.
            consumer.incremental_unassign([theirs(partition) for partition in fresh])
            found |= fresh
    finally:
        consumer.close()
    return found


def is_truncation(error: KafkaError) -> bool:
    """Whether a client that was assigned a position has found that the log was cut off there."""
    return error.code() == OFFSET_RESET_FORBIDDEN and _TRUNCATED in error.str()


def _consumer(settings: Settings) -> confluent_kafka.Consumer:
    return made(confluent_kafka.Consumer, settings.connection(ClientKind.LOG_CHECK))


def _at(partition: TopicPartition, position: LogPosition) -> confluent_kafka.TopicPartition:
    epoch = -1 if position.leader_epoch is None else position.leader_epoch
    return confluent_kafka.TopicPartition(
        partition.topic, partition.partition, position.offset, leader_epoch=epoch
    )


def _answer(message: Message, settings: Settings) -> bool | None:
    error = message.error()
    if error is None or error.code() == END_OF_PARTITION:
        return False
    if error.code() == OFFSET_RESET_FORBIDDEN:
        # Else it is out of range by now, which the bounds will tell.
        return is_truncation(error) or None
    topic = message.topic()
    if topic is not None and is_unreadable(message, error):
        return False  # the client fetches behind the position only after the leader verified it
    if is_passing(error):
        return None
    raise broker_error(
        error,
        Attempt("verifying the leader epochs of committed offsets", settings.brokers),
        () if topic is None else [TopicPartition(topic, int(message.partition() or 0))],
    )
