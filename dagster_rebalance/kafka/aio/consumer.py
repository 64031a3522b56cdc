"""`AsyncRebalanceAwareConsumer`: the consumer for asyncio.

Owns a `RebalanceAwareConsumer` in a thread of its own, and whose turn it is to poll: the next poll
begins when the task before has its records, or has given them back. Decides nothing about
rebalances.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.kafka.aio.interruptible import (
    AwaitingListener,
    Caller,
    InterruptibleConsumer,
)
from dagster_rebalance.kafka.aio.listener import AsyncRebalanceListener
from dagster_rebalance.kafka.aio.operations import AsyncOperations, refuse_in_callback
from dagster_rebalance.kafka.consumer.arguments import given_seconds
from dagster_rebalance.kafka.consumer.consumer import patience_s
from dagster_rebalance.kafka.consumer.listener import CALLBACKS, AnyRebalanceListener

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType
    from typing import Any, NoReturn

    from confluent_kafka import Message
    from typing_extensions import Self

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.consumer.arguments import AnyOffsets, AnyPartition
    from dagster_rebalance.kafka.consumer.consumer import PollResult
    from dagster_rebalance.kafka.consumer.operations import PauseMarksPolicy
    from dagster_rebalance.kafka.events import CommitResult
    from dagster_rebalance.kafka.ports import ClusterView, GroupMember

T = TypeVar("T")


AnyListener: TypeAlias = AnyRebalanceListener | AsyncRebalanceListener


class AsyncRebalanceAwareConsumer(AsyncOperations):
    """A consumer whose revokes can be delayed, for asyncio.

    Takes the arguments of `RebalanceAwareConsumer`, and has its methods as coroutines. Any task may
    call any of them: operations go through while a poll waits, other polls wait for their turn. A
    poll whose task is cancelled gives its records back: the next poll returns them.

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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def set_rebalance_listener(self, listener: AnyListener | None) -> None:
        """Who is told when partitions come and go, from the next poll on; None for nobody.

        The last one set wins.

        The callbacks of an `AsyncRebalanceListener` run in the event loop. Those of a
        `RebalanceListener` are plain functions: they run in the consumer's own thread, while the
        event loop goes on.

        Raises:
            IllegalStateError: It is no listener, or only some of its callbacks are coroutines.
        """
        if not isinstance(listener, AsyncRebalanceListener):
            self._consumer.set_rebalance_listener(listener)
        elif all(inspect.iscoroutinefunction(getattr(listener, name)) for name in CALLBACKS):
            self._consumer.set_rebalance_listener(AwaitingListener(self._consumer, listener))
        else:
            msg = (
                f"a callback of {listener!r} is no coroutine: write it with 'async def', "
                "or derive from RebalanceListener"
            )
            raise IllegalStateError(msg)

    async def subscribe(self, topics: Iterable[str] | re.Pattern[str]) -> None:
        """Take part in the group for these topics, or for those that match a compiled pattern.

        The pattern must match the whole name of a topic. A poll that waits returns at once.
        """
        await self._take_turn("subscribe", lambda: self._consumer.subscribe(topics))

    async def unsubscribe(self) -> None:
        """Give all partitions up and leave the group; a poll that waits returns at once."""
        await self._take_turn("unsubscribe", self._consumer.unsubscribe)

    async def close(self, timeout_s: float = 10.0) -> None:
        """Give all partitions up and leave the group; a poll that waits returns at once.

        May be called again.
        """
        refuse_in_callback("close")
        limit_s = given_seconds("close", timeout_s)
        if self._consumer.is_elsewhere:
            self._consumer.close()
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(
                self._take_turn("close", lambda: self._consumer.close(limit_s))
            )
            self._closing.add_done_callback(self._closed)
        await asyncio.shield(self._closing)

    async def check(self, timeout_s: float = 10.0) -> None:
        """Find out now what would go wrong later: brokers, credentials, the subscribed topics."""
        await self._run(lambda: self._consumer.check(timeout_s))

    async def poll(
        self,
        timeout_s: float | None = None,
        max_records: int = 500,
        *,
        timeout: float | None = None,
    ) -> list[Message]:
        """Complete due revokes, take part in the group, and return up to `max_records` records.

        The records come from assigned partitions.
        """
        wait_s = patience_s(timeout_s, timeout)
        return await self._poll(lambda: self._consumer.poll(wait_s, max_records))

    async def poll_with_rebalance(
        self,
        timeout_s: float | None = None,
        max_records: int = 500,
        *,
        timeout: float | None = None,
    ) -> PollResult:
        """Poll, and get what happened together with the records."""
        wait_s = patience_s(timeout_s, timeout)
        return await self._poll(lambda: self._consumer.poll_with_rebalance(wait_s, max_records))

    async def wakeup(self) -> None:
        """Let the poll that waits, or else the next one, return at once; an iteration ends."""
        self._consumer.wakeup()

    def __aiter__(self) -> Self:
        """Iterate over the records, until `wakeup` or `close`."""
        return self

    async def __anext__(self) -> Message:
        """The next record; each is polled for by itself."""
        is_over = False
        while not (is_over or self._closing):
            records, is_over = await self._poll(self._consumer.next_for_iteration)
            if records:
                return records[0]
        raise StopAsyncIteration

    async def get_to_be_revoked_partitions(self) -> frozenset[TopicPartition]:
        """The partitions that will be revoked in the next poll, unless they are delayed."""
        return await self._run(self._consumer.get_to_be_revoked_partitions)

    async def get_lost_partitions(self) -> frozenset[TopicPartition]:
        """The partitions that were lost during the last poll."""
        return await self._run(self._consumer.get_lost_partitions)

    async def delay_revoke(self, partitions: Iterable[AnyPartition]) -> bool:
        """Delay the revoke of partitions from the next poll to the one after it.

        Return False when some of the partitions are not assigned.
        """
        return await self._run(lambda: self._consumer.delay_revoke(partitions))

    async def commit_offsets(
        self, offsets: AnyOffsets, timeout_s: float | None = None
    ) -> CommitResult:
        """Commit next offsets and metadata in one request; return the result of each partition."""
        return await self._run(lambda: self._consumer.commit_offsets(offsets, timeout_s))

    async def pause_topics(self, topics: Iterable[str]) -> None:
        """Return no records of these topics until `resume_topics`."""
        await self._run(lambda: self._consumer.pause_topics(topics))

    async def resume_topics(self, topics: Iterable[str]) -> None:
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
        return self._consumer.member_id

    def _closed(self, closing: asyncio.Future[None]) -> None:
        if self._consumer.is_closed and not closing.cancelled():
            self._owner.stop()
        else:
            # Cancelled by the end of its event loop, say: the next call closes, or finds it done.
            self._closing = None

    async def _take_turn(self, call: str, function: Callable[[], T]) -> T:
        refuse_in_callback(call)
        # A poll may wait without end for what only this call can bring about.
        self._consumer.waiting += 1
        try:
            async with self._turn():
                return await asyncio.wrap_future(self._owner.submit(function, nested=False))
        finally:
            self._consumer.waiting -= 1

    async def _poll(self, function: Callable[[], T]) -> T:
        refuse_in_callback("poll")
        caller = Caller()
        async with self._turn():
            polling = self._owner.submit(
                lambda: self._consumer.poll_for(caller, function), nested=False
            )
            try:
                return await asyncio.wrap_future(polling)
            except BaseException:
                if caller.leave():
                    self._owner.submit(self._consumer.untell)
                raise

    def _turn(self) -> asyncio.Lock:
        """The turn of one poll after the other.

        It ends when the task has its records, or has given them back: otherwise a later poll, or
        the commit of a listener, would take them for read.
        """
        loop = asyncio.get_running_loop()
        if self._consumer.loop is not loop:
            self._consumer.loop, self._polling = loop, asyncio.Lock()
        return self._polling
