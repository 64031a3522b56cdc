"""The rebalance listener of `AsyncRebalanceAwareConsumer`: its callbacks are coroutines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.aio.operations import AsyncRebalanceConsumer


class AsyncRebalanceListener(ABC):
    """Told when partitions come and go, by coroutines in the event loop; see `RebalanceListener`.

    While one of them is awaited no other callback is called and no poll returns, but any task may
    commit, seek and ask.
    """

    @abstractmethod
    async def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        """Partitions were added to the assignment, possibly none."""

    @abstractmethod
    async def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        """Partitions are given up with the return from this coroutine."""

    async def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        """Partitions were taken away.

        Does what `on_partitions_revoked` does unless it is overridden.
        """
        await self.on_partitions_revoked(partitions, consumer)
