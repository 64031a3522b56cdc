"""The operations of a consumer for asyncio: the same as those without, each awaited.

Owns how a call gets to the thread that owns the consumer, and what is refused in a callback that
this thread waits for. What an operation does, and raises, is told by the method of the same name of
`RebalanceAwareConsumer`.
"""

from __future__ import annotations

import asyncio
import inspect
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from dagster_rebalance.core.model.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from typing import NoReturn

    from dagster_rebalance.core.model.errors import BrokerError
    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.kafka.client.owner_thread import OwnerThread
    from dagster_rebalance.kafka.consumer.arguments import AnyOffsets, AnyPartition, AnyTimestamps
    from dagster_rebalance.kafka.consumer.callback_view import RebalanceConsumer
    from dagster_rebalance.kafka.consumer.operations import (
        ConsumerGroupMetadata,
        ConsumerOperations,
    )
    from dagster_rebalance.kafka.events import Offsets
    from dagster_rebalance.kafka.ports import OffsetAndTimestamp, PartitionInfo

    AsyncCommitCallback: TypeAlias = Callable[[Offsets, BrokerError | None], Awaitable[None] | None]

T = TypeVar("T")


class AsyncOperations:
    """What the consumer and the view in a callback offer alike."""

    def __init__(
        self, owner: OwnerThread, consumer: ConsumerOperations | RebalanceConsumer
    ) -> None:
        self._owner = owner
        self._operations = consumer

    async def commit_sync(
        self, offsets: AnyOffsets | None = None, timeout_s: float | None = None
    ) -> None:
        """Commit the given next offsets, or the current positions, and wait for the outcome."""
        await self._run(lambda: self._operations.commit_sync(offsets, timeout_s))

    async def commit_async(
        self, offsets: AnyOffsets | None = None, callback: AsyncCommitCallback | None = None
    ) -> None:
        """Send the given next offsets, or the current positions, without waiting for the answer.

        The callback runs in the event loop, and may be a coroutine.
        """
        answer = None if callback is None else self._in_the_loop(callback)
        await self._run(lambda: self._operations.commit_async(offsets, answer))

    async def committed(
        self, partitions: Iterable[AnyPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed."""
        return await self._run(lambda: self._operations.committed(partitions, timeout_s))

    async def position(self, partition: AnyPartition, timeout_s: float = 10.0) -> int:
        """The next offset that `poll` returns."""
        return await self._run(lambda: self._operations.position(partition, timeout_s))

    async def seek(
        self, partition: AnyPartition, offset: int | OffsetAndMetadata | None = None
    ) -> None:
        """Read on from another offset."""
        await self._run(lambda: self._operations.seek(partition, offset))

    async def seek_to_beginning(self, partitions: Iterable[AnyPartition]) -> None:
        """Read on from the first offset that exists."""
        await self._run(lambda: self._operations.seek_to_beginning(partitions))

    async def seek_to_end(self, partitions: Iterable[AnyPartition]) -> None:
        """Read on from the next record that is produced."""
        await self._run(lambda: self._operations.seek_to_end(partitions))

    async def assignment(self) -> frozenset[TopicPartition]:
        """What is assigned."""
        return await self._run(self._operations.assignment)

    async def pause(self, partitions: Iterable[AnyPartition]) -> None:
        """Return no records of these partitions."""
        await self._run(lambda: self._operations.pause(partitions))

    async def resume(self, partitions: Iterable[AnyPartition]) -> None:
        """Undo a pause."""
        await self._run(lambda: self._operations.resume(partitions))

    async def paused(self) -> frozenset[TopicPartition]:
        """What is paused."""
        return await self._run(self._operations.paused)

    async def beginning_offsets(
        self, partitions: Iterable[AnyPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """The first offsets that exist."""
        return await self._run(lambda: self._operations.beginning_offsets(partitions, timeout_s))

    async def end_offsets(
        self, partitions: Iterable[AnyPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        """The offsets that the next records will get."""
        return await self._run(lambda: self._operations.end_offsets(partitions, timeout_s))

    async def offsets_for_times(
        self, timestamps: AnyTimestamps, timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first records at or after a time in milliseconds."""
        return await self._run(lambda: self._operations.offsets_for_times(timestamps, timeout_s))

    async def partitions_for(self, topic: str, timeout_s: float = 10.0) -> list[PartitionInfo]:
        """The partitions of a topic."""
        return await self._run(lambda: self._operations.partitions_for(topic, timeout_s))

    async def list_topics(self, timeout_s: float = 10.0) -> dict[str, list[PartitionInfo]]:
        """All topics that the principal may see."""
        return await self._run(lambda: self._operations.list_topics(timeout_s))

    async def current_lag(self, partition: AnyPartition) -> int | None:
        """How many offsets are left to read, as far as it is known."""
        return await self._run(lambda: self._operations.current_lag(partition))

    async def metrics(self) -> dict[str, dict[str, Any]]:
        """The latest statistics of librdkafka."""
        return self._operations.metrics()

    async def group_metadata(self) -> ConsumerGroupMetadata:
        """Who the group knows this consumer as."""
        return await self._run(self._operations.group_metadata)

    async def client_instance_id(self, timeout_s: float = 10.0) -> NoReturn:
        """Not to be had from librdkafka: raises `UnsupportedOperationError`."""
        self._operations.client_instance_id(timeout_s)

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._owner.submit(function))

    def _in_the_loop(
        self, callback: AsyncCommitCallback
    ) -> Callable[[Offsets, BrokerError | None], None]:
        loop = asyncio.get_running_loop()

        async def answer(offsets: Offsets, error: BrokerError | None) -> None:
            awaitable = callback(offsets, error)
            if inspect.isawaitable(awaitable):
                await awaitable

        return lambda offsets, error: self._owner.wait_for(
            asyncio.run_coroutine_threadsafe(marked(answer(offsets, error)), loop)
        )


class AsyncRebalanceConsumer(AsyncOperations):
    """Offers a consumer's methods during a rebalance callback that is a coroutine.

    See `RebalanceConsumer`. Every method raises `IllegalStateError` after the callback.
    """


def refuse_in_callback(call: str) -> None:
    """Refuse what would wait for the callback that calls it.

    Raises:
        IllegalStateError: The caller is a callback, or a task that a running callback has started.
    """
    callback = _CALLBACK.get()
    if callback is not None and callback.is_running:
        msg = f"{call} inside a rebalance callback: return from it first"
        raise IllegalStateError(msg)


class _Running:
    """A callback, as the tasks that it starts see it."""

    def __init__(self) -> None:
        self.is_running = True


_CALLBACK: ContextVar[_Running | None] = ContextVar("callback", default=None)


async def marked(callback: Awaitable[None]) -> None:
    """Await a callback in which a poll would wait for itself."""
    running = _Running()
    _CALLBACK.set(running)
    try:
        await callback
    finally:
        running.is_running = False
