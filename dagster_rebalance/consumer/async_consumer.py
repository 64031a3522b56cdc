"""`AsyncRebalanceAwareConsumer`: the consumer for asyncio.

Owns a `RebalanceAwareConsumer` in a thread of its own, and what happens when somebody stops waiting for a poll: its records are read again.
Decides nothing about rebalances.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from abc import ABC, abstractmethod
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from dagster_rebalance.consumer.async_operations import AsyncOperations, AsyncRebalanceConsumer
from dagster_rebalance.consumer.listener import CALLBACKS, AnyRebalanceListener, Callback, RebalanceListener
from dagster_rebalance.consumer.owner_thread import OwnerThread
from dagster_rebalance.consumer.rebalance_aware import PollResult, RebalanceAwareConsumer
from dagster_rebalance.core.errors import IllegalStateError

if TYPE_CHECKING:
    import re
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
    from types import TracebackType
    from typing import Any

    from confluent_kafka import Message
    from typing_extensions import Self

    from dagster_rebalance.consumer.events import CommitResult, LostReason
    from dagster_rebalance.consumer.pauses import PauseMarksPolicy
    from dagster_rebalance.consumer.port import ClusterView, GroupMember
    from dagster_rebalance.consumer.view import RebalanceConsumer
    from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncRebalanceListener(ABC):
    """Told when partitions come and go, by coroutines in the event loop; see `RebalanceListener`.

    While one of them is awaited no other callback is called and no poll returns, but any task may commit, seek and ask.
    """

    @abstractmethod
    async def on_partitions_assigned(self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer) -> None:
        """Partitions were added to the assignment, possibly none."""

    @abstractmethod
    async def on_partitions_revoked(self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer) -> None:
        """Partitions are given up with the return from this coroutine."""

    async def on_partitions_lost(self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer) -> None:
        """Partitions were taken away. Does what `on_partitions_revoked` does unless it is overridden."""
        await self.on_partitions_revoked(partitions, consumer)


AnyListener: TypeAlias = AnyRebalanceListener | AsyncRebalanceListener


class AsyncRebalanceAwareConsumer(AsyncOperations):
    """A consumer whose revokes can be delayed, for asyncio.

    Takes the arguments of `RebalanceAwareConsumer`, and has its methods as coroutines. Any task may call any of them: operations go through
    while a poll waits, other polls wait for their turn. A poll whose task is cancelled gives its records back: the next poll returns them.

    Example:
        ```python
        async with AsyncRebalanceAwareConsumer({"bootstrap.servers": "localhost:9092", "group.id": "etl"}) as consumer:
            await consumer.subscribe(["orders"])
            while True:
                work.start(await consumer.poll(1.0))
                await consumer.commit_sync(work.finished())
                unfinished = {tp for tp in await consumer.get_to_be_revoked_partitions() if work.is_busy(tp)}
                await consumer.delay_revoke(unfinished)
                work.abort(await consumer.get_lost_partitions())
        ```
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        hold_limit_s: float = 300.0,
        fetch: bool = True,
        complete_revoke_in_same_poll: bool = False,
        pause_marks: PauseMarksPolicy = "keep",
        probe_interval_s: float = 3.0,
        discovery_interval_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        member: GroupMember | None = None,
        cluster: ClusterView | None = None,
    ) -> None:
        self._consumer = _Interruptible(
            config,
            hold_limit_s=hold_limit_s,
            fetch=fetch,
            complete_revoke_in_same_poll=complete_revoke_in_same_poll,
            pause_marks=pause_marks,
            probe_interval_s=probe_interval_s,
            discovery_interval_s=discovery_interval_s,
            clock=clock,
            member=member,
            cluster=cluster,
        )
        super().__init__(self._consumer.owner, self._consumer)
        self._closing: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def set_rebalance_listener(self, listener: AnyListener | None) -> None:
        """Who is told when partitions come and go, from the next poll on; None for nobody. The last one set wins.

        The callbacks of an `AsyncRebalanceListener` run in the event loop. Those of a `RebalanceListener` are plain functions: they run in
        the consumer's own thread, while the event loop goes on.

        Raises:
            IllegalStateError: It is no listener, or only some of its callbacks are coroutines.
        """
        if not isinstance(listener, AsyncRebalanceListener):
            self._consumer.set_rebalance_listener(listener)
        elif all(inspect.iscoroutinefunction(getattr(listener, name)) for name in CALLBACKS):
            self._consumer.set_rebalance_listener(_Awaiting(self._consumer, listener))
        else:
            msg = f"a callback of {listener!r} is no coroutine: write it with 'async def', or derive from RebalanceListener"
            raise IllegalStateError(msg)

    async def subscribe(self, topics: Collection[str] | re.Pattern[str]) -> None:
        """Take part in the group for these topics, or for those whose whole name matches a compiled pattern."""
        await self._take_turn("subscribe", lambda: self._consumer.subscribe(topics))

    async def unsubscribe(self) -> None:
        """Give all partitions up and leave the group."""
        await self._take_turn("unsubscribe", self._consumer.unsubscribe)

    async def close(self, timeout_s: float = 10.0) -> None:
        """Give all partitions up and leave the group; a poll that waits returns at once. May be called again."""
        if self._closing is None:
            self._consumer.hurry = True
            self._closing = self._take_turn("close", lambda: self._consumer.close(timeout_s))
            self._closing.add_done_callback(lambda _: self._owner.stop())
        await asyncio.shield(self._closing)

    async def check(self, timeout_s: float = 10.0) -> None:
        """Find out now what would go wrong later: brokers, credentials, the subscribed topics."""
        await self._run(lambda: self._consumer.check(timeout_s))

    async def poll(self, timeout_s: float, max_records: int = 500) -> list[Message]:
        """Complete what is due, take part in the group, and return at most `max_records` records of what is assigned."""
        return await self._poll(lambda: self._consumer.poll(timeout_s, max_records), lambda records: records)

    async def poll_with_rebalance(self, timeout_s: float, max_records: int = 500) -> PollResult:
        """Poll, and get what happened together with the records."""
        return await self._poll(lambda: self._consumer.poll_with_rebalance(timeout_s, max_records), lambda result: result.records)

    async def get_to_be_revoked_partitions(self) -> frozenset[TopicPartition]:
        """The partitions that will be revoked in the next poll, unless they are delayed."""
        return await self._run(self._consumer.get_to_be_revoked_partitions)

    async def get_lost_partitions(self) -> frozenset[TopicPartition]:
        """The partitions that were lost during the last poll."""
        return await self._run(self._consumer.get_lost_partitions)

    async def lost_reasons(self) -> Mapping[TopicPartition, LostReason]:
        """Why each of the lost partitions was taken away."""
        return await self._run(self._consumer.lost_reasons)

    async def delay_revoke(self, partitions: Collection[TopicPartition]) -> bool:
        """Delay the revoke of partitions from the next poll to the one after it; False when some of them were lost."""
        return await self._run(lambda: self._consumer.delay_revoke(partitions))

    async def commit_offsets(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        """Commit next offsets and metadata in one request, and tell what became of each partition."""
        return await self._run(lambda: self._consumer.commit_offsets(offsets))

    async def pause_topics(self, topics: Collection[str]) -> None:
        """Return no records of these topics until `resume_topics`."""
        await self._run(lambda: self._consumer.pause_topics(topics))

    async def resume_topics(self, topics: Collection[str]) -> None:
        """Undo `pause_topics`, or take topics out of a paused pattern."""
        await self._run(lambda: self._consumer.resume_topics(topics))

    async def pause_pattern(self, pattern: re.Pattern[str]) -> None:
        """Return no records of topics whose whole name matches until `resume_pattern`."""
        await self._run(lambda: self._consumer.pause_pattern(pattern))

    async def resume_pattern(self, pattern: re.Pattern[str]) -> None:
        """Undo the pauses of all topics whose whole name matches."""
        await self._run(lambda: self._consumer.resume_pattern(pattern))

    async def pause_all(self) -> None:
        """Return no records at all until `resume_all`."""
        await self._run(self._consumer.pause_all)

    async def resume_all(self) -> None:
        """Undo `pause_all`."""
        await self._run(self._consumer.resume_all)

    async def member_id(self) -> str:
        """The id the group knows this member by."""
        return await self._run(lambda: self._consumer.member_id)

    def _take_turn(self, call: str, function: Callable[[], T]) -> asyncio.Future[T]:
        callback = _CALLBACK.get()
        if callback is not None and callback.is_running:
            msg = f"{call} inside a rebalance callback: return from it first"
            raise IllegalStateError(msg)
        self._consumer.loop = asyncio.get_running_loop()
        return asyncio.wrap_future(self._owner.submit(function, nested=False))

    async def _poll(self, function: Callable[[], T], records_of: Callable[[T], list[Message]]) -> T:
        caller = _Caller()
        polling = self._take_turn("poll", lambda: self._consumer.poll_for(caller, function, records_of))
        try:
            return await polling
        except asyncio.CancelledError:
            unseen = caller.leave()
            if unseen:
                self._owner.submit(lambda: self._consumer.put_back(unseen))
            raise


class _Caller:
    """Who waits for a poll, and may stop waiting at any moment. Either it gets the records, or they are put back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[Message] = []
        self.has_left = False

    def leave(self) -> list[Message]:
        """Stop waiting; what was delivered all the same, and is not going to be seen."""
        with self._lock:
            self.has_left = True
            return self._records

    def deliver(self, records: list[Message]) -> bool:
        """Whether the caller is still there."""
        with self._lock:
            self._records = records
            return not self.has_left


class _Interruptible(RebalanceAwareConsumer):
    """A consumer whose polls let other calls through, and can be ended early."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - those of RebalanceAwareConsumer
        super().__init__(*arguments, **options)
        self.owner = OwnerThread("consumer")
        self.loop: asyncio.AbstractEventLoop | None = None
        self.hurry = False
        self._caller = _Caller()

    def poll_for(self, caller: _Caller, poll: Callable[[], T], records_of: Callable[[T], list[Message]]) -> T:
        """Poll for as long as the caller waits."""
        self._caller = caller
        try:
            result = poll()
        except Exception:
            if caller.has_left:
                logger.exception("a poll that nobody waits for any more has failed")
            raise
        records = records_of(result)
        if not caller.deliver(records):
            self.put_back(records)
        return result

    def put_back(self, records: list[Message]) -> None:
        """Let the next poll return these records."""
        if self._fetcher:
            self._fetcher.put_back(records)

    def wait_for(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the event loop, and let operations through meanwhile."""
        if self.loop is None or self.loop.is_closed():
            coroutine.close()
            msg = "the event loop is closed: close the consumer before the loop ends"
            raise IllegalStateError(msg)
        self.owner.wait_for(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def _between_slices(self) -> bool:
        self.owner.serve()
        return self.hurry or self._caller.has_left


class _Awaiting(RebalanceListener):
    """A listener whose callbacks are coroutines, called from the consumer's thread."""

    def __init__(self, consumer: _Interruptible, listener: AsyncRebalanceListener) -> None:
        self._consumer = consumer
        self._listener = listener

    def on_partitions_assigned(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
        self._await("on_partitions_assigned", partitions, consumer)

    def on_partitions_revoked(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
        self._await("on_partitions_revoked", partitions, consumer)

    def on_partitions_lost(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
        self._await("on_partitions_lost", partitions, consumer)

    def _await(self, callback: Callback, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
        view = AsyncRebalanceConsumer(self._consumer.owner, consumer)
        self._consumer.wait_for(_marked(getattr(self._listener, callback)(partitions, view)))


class _Running:
    """A callback, as the tasks that it starts see it."""

    def __init__(self) -> None:
        self.is_running = True


_CALLBACK: ContextVar[_Running | None] = ContextVar("callback", default=None)


async def _marked(callback: Awaitable[None]) -> None:
    """Await a callback in which a poll would wait for itself."""
    running = _Running()
    _CALLBACK.set(running)
    try:
        await callback
    finally:
        running.is_running = False
