"""`AsyncRebalanceAwareConsumer`, the consumer for asyncio.

It owns a `RebalanceAwareConsumer` in a separate thread. Polls of several tasks run one at a time:
the next poll starts when the previous task has received its records or returned them.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.kafka.aio.async_operations import (
    AsyncOperations,
    AsyncRebalanceConsumer,
    AsyncRebalanceListener,
    awaited,
    in_callback,
    refuse_in_callback,
)
from dagster_rebalance.kafka.aio.async_worker import InterruptibleConsumer, PollCaller
from dagster_rebalance.kafka.consumer.arguments import parse_seconds
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer, poll_timeout_s
from dagster_rebalance.kafka.consumer.listener import (
    CALLBACKS,
    AnyRebalanceListener,
    Callback,
    ForwardingListener,
)

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import Any, NoReturn

    from confluent_kafka import Message
    from typing_extensions import Self

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.consumer.consumer import PollResult
    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer
    from dagster_rebalance.kafka.consumer.state import PauseMarksPolicy
    from dagster_rebalance.kafka.group_ports import ClusterView, GroupMember

T = TypeVar("T")

AnyListener: TypeAlias = AnyRebalanceListener | AsyncRebalanceListener


class AsyncRebalanceAwareConsumer(AsyncOperations):
    """Consumer whose revokes can be delayed, for asyncio.

    It takes the arguments of `RebalanceAwareConsumer`, and its methods are coroutines. Any task may
    call any method: operations run while a poll waits, and polls run one at a time. If a task is
    cancelled during its poll, the next poll returns the records.

    Example:
        ```python
        settings = {"bootstrap.servers": "localhost:9092", "group.id": "etl"}
        async with AsyncRebalanceAwareConsumer(settings) as consumer:
            await consumer.subscribe(["orders"])
            while True:
                records = await consumer.poll(1.0)
                work.abort(await consumer.get_lost_partitions())
                work.start(records)
                await consumer.commit_sync(work.finished())
                due = await consumer.get_to_be_revoked_partitions()
                await consumer.delay_revoke({tp for tp in due if work.is_busy(tp)})
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
        self._consumer = InterruptibleConsumer(
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
        self._polling = asyncio.Lock()
        self._closing: asyncio.Future[None] | None = None

    def __reduce__(self) -> NoReturn:
        self._consumer.__reduce__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def set_rebalance_listener(self, listener: AnyListener | None) -> None:
        """Set the listener for assignment changes from the next poll on; None removes it.

        Callbacks of an `AsyncRebalanceListener` run in the event loop. Callbacks of a
        `RebalanceListener` are plain functions and run in the consumer's thread.

        Raises:
            IllegalStateError: The object is not a listener, or only some of its callbacks are
                coroutines.
        """
        if not isinstance(listener, AsyncRebalanceListener):
            self._consumer.set_rebalance_listener(listener)
            return
        if not all(inspect.iscoroutinefunction(getattr(listener, name)) for name in CALLBACKS):
            msg = (
                f"a callback of {listener!r} is not a coroutine function: define it with "
                "'async def', or derive the listener from RebalanceListener"
            )
            raise IllegalStateError(msg)

        def await_callback(
            callback: Callback, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
        ) -> None:
            coroutine = getattr(listener, callback)(
                partitions, AsyncRebalanceConsumer(self._owner, consumer)
            )
            self._consumer.wait_for(in_callback(coroutine))

        self._consumer.set_rebalance_listener(ForwardingListener(await_callback))

    async def subscribe(self, topics: Iterable[str] | re.Pattern[str]) -> None:
        """Subscribe to topics, or to the topics whose whole name matches a compiled pattern.

        A poll that waits returns at once.
        """
        await self._take_turn("subscribe", lambda: self._consumer.subscribe(topics))

    async def unsubscribe(self) -> None:
        """Give up all partitions and leave the group; a poll that waits returns at once."""
        await self._take_turn("unsubscribe", self._consumer.unsubscribe)

    async def close(self, timeout_s: float = 10.0) -> None:
        """Give up all partitions and leave the group; further calls have no effect.

        A poll that waits returns at once.
        """
        refuse_in_callback("close")
        limit_s = parse_seconds("close", timeout_s)
        if self._consumer.is_forked:
            self._consumer.close()
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(
                self._take_turn("close", lambda: self._consumer.close(limit_s))
            )
            self._closing.add_done_callback(self._closed)
        await asyncio.shield(self._closing)

    async def poll(
        self,
        timeout_s: float | None = None,
        max_records: int = 500,
        *,
        timeout: float | None = None,
    ) -> list[Message]:
        """Complete due revokes, take part in the group, and return records of assigned partitions.

        Arguments and errors are those of `RebalanceAwareConsumer.poll`.
        """
        wait_s = poll_timeout_s(timeout_s, timeout)
        return await self._poll(lambda: self._consumer.poll(wait_s, max_records))

    async def poll_with_rebalance(
        self,
        timeout_s: float | None = None,
        max_records: int = 500,
        *,
        timeout: float | None = None,
    ) -> PollResult:
        """Poll, and return the records and the assignment changes."""
        wait_s = poll_timeout_s(timeout_s, timeout)
        return await self._poll(lambda: self._consumer.poll_with_rebalance(wait_s, max_records))

    async def wakeup(self) -> None:
        """Let the poll that waits, or else the next one, return at once; an iteration ends."""
        self._consumer.wakeup()

    def __aiter__(self) -> Self:
        """Iterate over the records, until `wakeup` or `close`."""
        return self

    async def __anext__(self) -> Message:
        """Return the next record; the consumer reads ahead as in `RebalanceAwareConsumer`."""
        ahead = self._consumer.ahead
        records, taken = ahead.records, ahead.taken
        if (
            taken < len(records)
            and self._is_quiet()
            # Plain steps, without a call: a signal handler may raise or take records in between.
            and ahead.is_checked
            and ahead.records is records
            and ahead.taken == taken
        ):
            ahead.taken = taken + 1
            return records[taken]
        is_over = False
        while not (is_over or self._closing):
            records, is_over = await self._poll(self._consumer.next_for_iteration)
            if records:
                return records[0]
        raise StopAsyncIteration

    check = awaited(RebalanceAwareConsumer.check)
    get_to_be_revoked_partitions = awaited(RebalanceAwareConsumer.get_to_be_revoked_partitions)
    get_lost_partitions = awaited(RebalanceAwareConsumer.get_lost_partitions)
    delay_revoke = awaited(RebalanceAwareConsumer.delay_revoke)
    commit_offsets = awaited(RebalanceAwareConsumer.commit_offsets)
    pause_topics = awaited(RebalanceAwareConsumer.pause_topics)
    resume_topics = awaited(RebalanceAwareConsumer.resume_topics)
    pause_pattern = awaited(RebalanceAwareConsumer.pause_pattern)
    resume_pattern = awaited(RebalanceAwareConsumer.resume_pattern)
    pause_all = awaited(RebalanceAwareConsumer.pause_all)
    resume_all = awaited(RebalanceAwareConsumer.resume_all)

    async def member_id(self) -> str:
        """Return the id of this member in the group; empty before it joined."""
        return self._consumer.member_id

    def _is_quiet(self) -> bool:
        """Return whether no other task uses the consumer, and a poll would only return a record."""
        return (
            not (self._closing or self._polling.locked())
            and self._owner.is_idle
            and self._consumer.is_quiet()
        )

    def _closed(self, closing: asyncio.Future[None]) -> None:
        if self._consumer.is_closed and not closing.cancelled():
            self._owner.stop()
        else:
            # Cancelled, for example by the end of its event loop: the next call closes again.
            self._closing = None

    async def _take_turn(self, call: str, function: Callable[[], T]) -> T:
        refuse_in_callback(call)
        # A poll may wait indefinitely for an event that only this call causes.
        self._consumer.waiting += 1
        try:
            async with self._turn():
                return await asyncio.wrap_future(self._owner.submit(function, nested=False))
        finally:
            self._consumer.waiting -= 1

    async def _poll(self, function: Callable[[], T]) -> T:
        refuse_in_callback("poll")
        caller = PollCaller()
        async with self._turn():
            polling = self._owner.submit(
                lambda: self._consumer.poll_for(caller, function), nested=False
            )
            try:
                return await asyncio.wrap_future(polling)
            except BaseException:
                if caller.cancel():
                    self._owner.submit(self._consumer.redeliver)
                raise

    def _turn(self) -> asyncio.Lock:
        """Return the lock of the running poll.

        The lock is held until the task has received the records of the poll, or has returned them.
        Otherwise a later poll, or a listener's commit, would count the records as read.
        """
        loop = asyncio.get_running_loop()
        if self._consumer.loop is not loop:
            self._consumer.loop, self._polling = loop, asyncio.Lock()
        return self._polling
