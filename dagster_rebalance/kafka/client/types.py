"""Partitions and offsets between this package's words and the client's.

Owns what the client's special offsets mean here. Must never add to or subtract from an offset.
"""

from __future__ import annotations

import confluent_kafka

from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition

_NO_EPOCH = -1


def ours(partition: confluent_kafka.TopicPartition) -> TopicPartition:
    """The partition that the client names."""
    return TopicPartition(partition.topic, partition.partition)


def theirs(
    partition: TopicPartition, offset: int = confluent_kafka.OFFSET_INVALID
) -> confluent_kafka.TopicPartition:
    """The partition for the client, with an absolute or a special offset."""
    return confluent_kafka.TopicPartition(partition.topic, partition.partition, offset)


def to_commit(
    partition: TopicPartition, wanted: OffsetAndMetadata
) -> confluent_kafka.TopicPartition:
    """What the client is to commit.

    Raises:
        TypeError: It is no offset.
    """
    if not isinstance(wanted, OffsetAndMetadata):
        msg = (
            f"a commit for {partition} must be an OffsetAndMetadata with the next offset, "
            f"not {wanted!r}"
        )
        raise TypeError(msg)
    epoch = _NO_EPOCH if wanted.leader_epoch is None else wanted.leader_epoch
    return confluent_kafka.TopicPartition(
        partition.topic,
        partition.partition,
        wanted.offset,
        metadata=wanted.metadata,
        leader_epoch=epoch,
    )


def as_committed(partition: confluent_kafka.TopicPartition) -> OffsetAndMetadata | None:
    """What the client found committed; None where the group has nothing."""
    if partition.offset < 0:
        return None
    epoch: int | None = partition.leader_epoch
    return OffsetAndMetadata(
        partition.offset, partition.metadata or "", None if epoch in {None, _NO_EPOCH} else epoch
    )
