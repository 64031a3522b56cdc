"""The restricted view of the consumer that a rebalance callback is given (KAFKA-20385).

Owns what a callback may do, and for how long: the view is dead once its callback has returned. Must
never offer a call that would poll, leave, or change the subscription in the middle of a rebalance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, NoReturn

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.kafka.consumer.arguments import AnyOffsets, AnyPartition, AnyTimestamps
    from dagster_rebalance.kafka.consumer.commits import CommitCallback
    from dagster_rebalance.kafka.consumer.operations import (
        ConsumerGroupMetadata,
        ConsumerOperations,
    )
    from dagster_rebalance.kafka.ports import OffsetAndTimestamp, PartitionInfo


class RebalanceConsumer:
    """Offers a consumer's methods during a rebalance callback.

    See the methods of the same name of `RebalanceAwareConsumer`. Every method raises
    `IllegalStateError` after the callback, from any thread.
    """

    def __init__(self, consumer: ConsumerOperations) -> None:
        self._consumer: ConsumerOperations | None = consumer

    def expire(self) -> None:
        """End the view, with its callback. Called by the consumer; there is no way back."""
        self._consumer = None

    def commit_sync(
        self, offsets: AnyOffsets | None = None, timeout_s: float | None = None
    ) -> None:
        """Commit the given next offsets, or the current positions."""
        self._alive().commit_sync(offsets, timeout_s)

    def commit_async(
        self, offsets: AnyOffsets | None = None, callback: CommitCallback | None = None
    ) -> None:
        """Send the given next offsets, or the current positions, and go on."""
        self._alive().commit_async(offsets, callback)

    def committed(
        self, partitions: Iterable[AnyPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed."""
        return self._alive().committed(partitions, timeout_s)

    def position(self, partition: AnyPartition, timeout_s: float = 10.0) -> int:
        """The next offset that `poll` returns."""
        return self._alive().position(partition, timeout_s)

    def seek(self, partition: AnyPartition, offset: int | OffsetAndMetadata | None = None) -> None:
        """Read on from another offset."""
        self._alive().seek(partition, offset)

    def seek_to_beginning(self, partitions: Iterable[AnyPartition]) -> None:
        """Read on from the first offset that exists."""
        self._alive().seek_to_beginning(partitions)

    def seek_to_end(self, partitions: Iterable[AnyPartition]) -> None:
        """Read on from the next record that is produced."""
        self._alive().seek_to_end(partitions)

    def assignment(self) -> frozenset[TopicPartition]:
        """What is assigned: partitions being revoked are still in it, lost ones are not."""
        return self._alive().assignment()

    def pause(self, partitions: Iterable[AnyPartition]) -> None:
        """Return no records of these partitions, also after the callback."""
        self._alive().pause(partitions)

    def resume(self, partitions: Iterable[AnyPartition]) -> None:
        """Undo a pause."""
        self._alive().resume(partitions)

    def paused(self) -> frozenset[TopicPartition]:
        """What is paused."""
        return self._alive().paused()

    def beginning_offsets(
        self, partitions: Iterable[AnyPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """The first offsets that exist."""
        return self._alive().beginning_offsets(partitions, timeout_s)

    def end_offsets(
        self, partitions: Iterable[AnyPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """The offsets that the next records will get."""
        return self._alive().end_offsets(partitions, timeout_s)

    def offsets_for_times(
        self, timestamps: AnyTimestamps, timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first records at or after a time in milliseconds."""
        return self._alive().offsets_for_times(timestamps, timeout_s)

    def partitions_for(self, topic: str, timeout_s: float = 10.0) -> list[PartitionInfo]:
        """The partitions of a topic."""
        return self._alive().partitions_for(topic, timeout_s)

    def list_topics(self, timeout_s: float = 10.0) -> dict[str, list[PartitionInfo]]:
        """All topics that the principal may see."""
        return self._alive().list_topics(timeout_s)

    def current_lag(self, partition: AnyPartition) -> int | None:
        """How many offsets are left to read, as far as it is known."""
        return self._alive().current_lag(partition)

    def metrics(self) -> dict[str, dict[str, Any]]:
        """The latest statistics of librdkafka."""
        return self._alive().metrics()

    def group_metadata(self) -> ConsumerGroupMetadata:
        """Who the group knows this consumer as."""
        return self._alive().group_metadata()

    def client_instance_id(self, timeout_s: float = 10.0) -> NoReturn:
        """Not to be had from librdkafka: raises `UnsupportedOperationError`."""
        self._alive().client_instance_id(timeout_s)

    def _alive(self) -> ConsumerOperations:
        consumer = self._consumer
        if consumer is None:
            msg = (
                "this view of the consumer ended with its callback: "
                "use the consumer itself, outside of callbacks"
            )
            raise IllegalStateError(msg)
        return consumer
