"""The consumer's operations for asyncio, derived from `kafka.consumer.operations`.

An operation runs in the thread that owns the consumer, and its coroutine waits for the result.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from abc import ABC, abstractmethod
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.kafka.consumer.operations import ConsumerOperations

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine
    from typing import NoReturn

    from dagster_rebalance.core.model.errors import BrokerError
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.client.owner_thread import OwnerThread
    from dagster_rebalance.kafka.consumer.arguments import AnyOffsets
    from dagster_rebalance.kafka.group_ports import Offsets

    AsyncCommitCallback: TypeAlias = Callable[[Offsets, BrokerError | None], Awaitable[None] | None]

P = ParamSpec("P")
R = TypeVar("R")


def awaited(
    operation: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[AsyncOperations, P], Coroutine[Any, Any, R]]:
    """Return an operation as a coroutine function with the same parameters and documentation."""

    @functools.wraps(operation)
    async def awaited_call(
        self: AsyncOperations, *arguments: P.args, **named_arguments: P.kwargs
    ) -> R:
        return await self._run(lambda: operation(self._operations, *arguments, **named_arguments))

    return cast("Callable[Concatenate[AsyncOperations, P], Coroutine[Any, Any, R]]", awaited_call)


class AsyncOperations:
    """Operations of `AsyncRebalanceAwareConsumer` and of `AsyncRebalanceConsumer`."""

    def __init__(self, owner: OwnerThread, consumer: ConsumerOperations) -> None:
        self._owner = owner
        self._operations = consumer

    assignment = awaited(ConsumerOperations.assignment)
    commit_sync = awaited(ConsumerOperations.commit_sync)

    async def commit_async(
        self, offsets: AnyOffsets | None = None, callback: AsyncCommitCallback | None = None
    ) -> None:
        """Send a commit without waiting for its result, in the order of the calls.

        Args:
            offsets: The next offset of each partition; by default the current position of every
                partition that was read.
            callback: A function or coroutine function that is called in the event loop, during a
                later `poll`, `unsubscribe` or `close`, with the offsets and the error that
                `commit_sync` would raise, or None. Without a callback, errors are logged.
        """
        on_answer = None if callback is None else self._in_event_loop(callback)
        await self._run(lambda: self._operations.commit_async(offsets, on_answer))

    committed = awaited(ConsumerOperations.committed)
    position = awaited(ConsumerOperations.position)
    seek = awaited(ConsumerOperations.seek)
    seek_to_beginning = awaited(ConsumerOperations.seek_to_beginning)
    seek_to_end = awaited(ConsumerOperations.seek_to_end)
    beginning_offsets = awaited(ConsumerOperations.beginning_offsets)
    end_offsets = awaited(ConsumerOperations.end_offsets)
    offsets_for_times = awaited(ConsumerOperations.offsets_for_times)
    partitions_for = awaited(ConsumerOperations.partitions_for)
    list_topics = awaited(ConsumerOperations.list_topics)
    current_lag = awaited(ConsumerOperations.current_lag)
    group_metadata = awaited(ConsumerOperations.group_metadata)
    pause = awaited(ConsumerOperations.pause)
    resume = awaited(ConsumerOperations.resume)
    paused = awaited(ConsumerOperations.paused)

    async def metrics(self) -> dict[str, dict[str, Any]]:
        """Return the latest statistics of librdkafka, also after `close`."""
        return self._operations.metrics()

    async def client_instance_id(self, timeout_s: float = 10.0) -> NoReturn:
        """Raise `UnsupportedOperationError`: librdkafka does not reveal its telemetry id."""
        self._operations.client_instance_id(timeout_s)

    async def _run(self, function: Callable[[], R]) -> R:
        return await asyncio.wrap_future(self._owner.submit(function))

    def _in_event_loop(
        self, callback: AsyncCommitCallback
    ) -> Callable[[Offsets, BrokerError | None], None]:
        loop = asyncio.get_running_loop()

        async def call(offsets: Offsets, error: BrokerError | None) -> None:
            awaitable = callback(offsets, error)
            if inspect.isawaitable(awaitable):
                await awaitable

        return lambda offsets, error: self._owner.wait_for(
            asyncio.run_coroutine_threadsafe(in_callback(call(offsets, error)), loop)
        )


class AsyncRebalanceConsumer(AsyncOperations):
    """Consumer that a callback of an `AsyncRebalanceListener` receives; see `RebalanceConsumer`.

    After the callback every method raises `IllegalStateError`.
    """


class AsyncRebalanceListener(ABC):
    """Listener whose callbacks are coroutines in the event loop; see `RebalanceListener`.

    During a callback no other callback is called and no poll returns, but any task may call
    operations such as commits, seeks and queries.
    """

    @abstractmethod
    async def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        """Handle partitions that were added to the assignment, possibly none."""

    @abstractmethod
    async def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        """Handle partitions that are given up when this coroutine returns."""

    async def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        """Handle the loss of all partitions; by default, call `on_partitions_revoked`."""
        await self.on_partitions_revoked(partitions, consumer)


class _RunningCallback:
    """A callback, as seen by the tasks that it starts."""

    def __init__(self) -> None:
        self.is_running = True


_CALLBACK: ContextVar[_RunningCallback | None] = ContextVar("callback", default=None)


async def in_callback(callback: Awaitable[None]) -> None:
    """Await a callback, and let `refuse_in_callback` detect calls from it."""
    running = _RunningCallback()
    _CALLBACK.set(running)
    try:
        await callback
    finally:
        running.is_running = False


def refuse_in_callback(call: str) -> None:
    """Refuse a call inside a callback that would wait for the end of this callback.

    Raises:
        IllegalStateError: The caller is a running callback, or a task that it started.
    """
    callback = _CALLBACK.get()
    if callback is not None and callback.is_running:
        msg = f"{call} inside a rebalance callback: return from the callback first"
        raise IllegalStateError(msg)
