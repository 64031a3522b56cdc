"""Create clients of confluent-kafka, and convert partitions and offsets to and from its types.

Owns the meaning of the client's special offsets. Must never add to or subtract from an offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import confluent_kafka
from confluent_kafka import KafkaException

from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.client.errors import configuration_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from confluent_kafka import Message

_Client = TypeVar("_Client")
_NO_EPOCH = -1


def create_client(
    client_class: Callable[[dict[str, Any]], _Client], config: Mapping[str, Any]
) -> _Client:
    """Create a client.

    Raises:
        BrokerError: `oauth_cb` returned no token.
        ConfigurationError: The client refuses a setting; the message names it.
    """
    tokens = config.get("oauth_cb")
    if tokens is not None:
        tokens(config.get("sasl.oauthbearer.config", ""))
    try:
        return client_class(dict(config))
    except (KafkaException, ValueError, TypeError) as problem:
        raise configuration_error(problem) from None


def partition_of(message: Message) -> TopicPartition:
    """Return the partition of a record; an error without a partition has no topic."""
    return TopicPartition(message.topic() or "", message.partition() or 0)


def from_confluent(partition: confluent_kafka.TopicPartition) -> TopicPartition:
    """Return the partition that the client names."""
    return TopicPartition(partition.topic, partition.partition)


def to_confluent(
    partition: TopicPartition, offset: int = confluent_kafka.OFFSET_INVALID
) -> confluent_kafka.TopicPartition:
    """Return the partition for the client, with an absolute or a special offset."""
    return confluent_kafka.TopicPartition(partition.topic, partition.partition, offset)


def to_commit(
    partition: TopicPartition, offset: OffsetAndMetadata
) -> confluent_kafka.TopicPartition:
    """Return the partition with the offset and metadata of a commit."""
    if not isinstance(offset, OffsetAndMetadata):
        msg = (
            f"a commit for {partition} must be an OffsetAndMetadata with the next offset, "
            f"not {offset!r}"
        )
        raise TypeError(msg)
    return confluent_kafka.TopicPartition(
        partition.topic,
        partition.partition,
        offset.offset,
        metadata=offset.metadata,
        leader_epoch=_NO_EPOCH if offset.leader_epoch is None else offset.leader_epoch,
    )


def from_committed(partition: confluent_kafka.TopicPartition) -> OffsetAndMetadata | None:
    """Return the committed offset in a client's response; None if the group has none."""
    if partition.offset < 0:
        return None
    epoch: int | None = partition.leader_epoch
    return OffsetAndMetadata(
        partition.offset, partition.metadata or "", None if epoch in {None, _NO_EPOCH} else epoch
    )
