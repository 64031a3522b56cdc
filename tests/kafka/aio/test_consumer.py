"""`AsyncRebalanceAwareConsumer` on a fake group: callbacks, turns of polls, cancellation, close."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.errors import IllegalStateError, PartitionLostError
from dagster_rebalance.core.model.events import LostReason, PartitionsLost
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.aio.async_consumer import AsyncRebalanceAwareConsumer
from dagster_rebalance.kafka.aio.async_operations import AsyncRebalanceListener
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.kafka.consumers import CONFIG, EVERYTHING, P0, P1, P2, P3, Listener

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from dagster_rebalance.core.model.errors import BrokerError
    from dagster_rebalance.kafka.aio.async_operations import AsyncRebalanceConsumer
    from dagster_rebalance.kafka.consumer.listener import RebalanceListener
    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer

LONG_S = 1e9
REFUSAL = "{} inside a rebalance callback: return from the callback first"


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup({"orders": 4})


def consumer_of(group: FakeGroup) -> AsyncRebalanceAwareConsumer:
    return AsyncRebalanceAwareConsumer(
        CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )


async def owner(
    group: FakeGroup, listener: AsyncRebalanceListener | RebalanceListener | None = None
) -> AsyncRebalanceAwareConsumer:
    """A consumer that owns all partitions."""
    consumer = consumer_of(group)
    consumer.set_rebalance_listener(listener)
    await consumer.subscribe(["orders"])
    await consumer.poll(0.1)
    return consumer


async def ignore(_callback: str, _consumer: AsyncRebalanceConsumer) -> None:
    """Do nothing in a callback."""


class AsyncListener(AsyncRebalanceListener):
    """Records its callbacks in `calls`, and awaits a function in them."""

    def __init__(
        self, during: Callable[[str, AsyncRebalanceConsumer], Awaitable[None]] = ignore
    ) -> None:
        self.calls: list[tuple[str, set[TopicPartition]]] = []
        self.during = during
        self.threads: set[int] = set()
        self.consumers: list[AsyncRebalanceConsumer] = []

    async def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        await self._record("assigned", partitions, consumer)

    async def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        await self._record("revoked", partitions, consumer)

    async def _record(
        self,
        callback: str,
        partitions: Collection[TopicPartition],
        consumer: AsyncRebalanceConsumer,
    ) -> None:
        self.calls.append((callback, set(partitions)))
        self.threads.add(threading.get_ident())
        self.consumers.append(consumer)
        await self.during(callback, consumer)


async def test_revoke_is_delayed_and_completed_as_without_asyncio(group: FakeGroup) -> None:
    async with await owner(group) as blue, consumer_of(group) as green:
        await green.subscribe(["orders"])
        await green.poll(0.1)
        result = await blue.poll_with_rebalance(LONG_S)
        assert result.to_be_revoked == {P2, P3}
        assert await blue.delay_revoke([P2, P3])
        await blue.poll(0.1)
        assert await blue.get_to_be_revoked_partitions() == {P2, P3}
        await blue.commit_sync({P2: OffsetAndMetadata(5)})
        await blue.poll(0.1)
        await green.poll(0.1)
        assert await green.assignment() == {P2, P3}
        assert await green.committed([P2]) == {P2: OffsetAndMetadata(5)}
    assert not group.members


async def test_coroutine_callbacks_run_in_the_event_loop(group: FakeGroup) -> None:
    """Their consumer ends with the callback."""

    async def during(callback: str, consumer: AsyncRebalanceConsumer) -> None:
        await asyncio.sleep(0)
        assert await consumer.assignment() == set(EVERYTHING)
        if callback == "revoked":
            await consumer.commit_sync({P0: OffsetAndMetadata(9)})

    listener = AsyncListener(during)
    async with await owner(group, listener):
        with pytest.raises(IllegalStateError, match="ended with its callback"):
            await listener.consumers[0].assignment()
    assert listener.threads == {threading.get_ident()}
    assert listener.calls == [("assigned", set(EVERYTHING)), ("revoked", set(EVERYTHING))]
    assert group.committed == {P0: OffsetAndMetadata(9)}


async def test_loss_calls_on_partitions_revoked_by_default_with_asyncio(group: FakeGroup) -> None:
    listener = AsyncListener()
    async with await owner(group, listener) as blue:
        group.fence(group.members[0])
        result = await blue.poll_with_rebalance(1.0)
        assert await blue.get_lost_partitions() == set(EVERYTHING)
        assert result.events == (PartitionsLost(EVERYTHING, LostReason.SESSION),)
    assert listener.calls[1] == ("revoked", set(EVERYTHING))


async def test_callback_may_wait_for_a_worker_that_commits(group: FakeGroup) -> None:
    """KIP-983: with asyncio "the single-thread consumer lock makes it very hard"."""
    may_finish = asyncio.Event()

    async def work() -> None:
        await may_finish.wait()
        await blue.commit_sync({P1: OffsetAndMetadata(4)})

    async def drain(callback: str, _consumer: AsyncRebalanceConsumer) -> None:
        if callback == "revoked":
            may_finish.set()
            await worker

    blue = await owner(group, AsyncListener(drain))
    worker = asyncio.create_task(work())
    await blue.close()
    assert group.committed == {P1: OffsetAndMetadata(4)}


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("poll", [0]),
        ("poll_with_rebalance", [0]),
        ("close", []),
        ("unsubscribe", []),
        ("subscribe", [["orders"]]),
    ],
)
@pytest.mark.parametrize("where", ["callback", "commit"])
async def test_call_that_would_wait_for_its_callback_is_refused(
    group: FakeGroup, call: str, arguments: list[object], where: str
) -> None:
    """In a rebalance callback and in the callback of a commit; the same task may poll later."""
    refused: list[str] = []

    async def nest(*_: object) -> None:
        with pytest.raises(IllegalStateError) as caught:
            await getattr(blue, call)(*arguments)
        refused.append(str(caught.value))

    blue = consumer_of(group)
    blue.set_rebalance_listener(AsyncListener(nest) if where == "callback" else None)
    await blue.subscribe(["orders"])
    await blue.poll(0.1)
    if where == "commit":
        await blue.commit_async({P0: OffsetAndMetadata(3)}, nest)
    await blue.poll(0.1)
    blue.set_rebalance_listener(None)
    await blue.close()
    assert refused == [REFUSAL.format(call.removesuffix("_with_rebalance"))]


async def test_exception_of_a_coroutine_reaches_the_caller_of_poll_once(group: FakeGroup) -> None:
    async def fail(callback: str, _consumer: AsyncRebalanceConsumer) -> None:
        if callback == "assigned":
            msg = "a bug of the user's"
            raise ValueError(msg)

    async with consumer_of(group) as blue:
        blue.set_rebalance_listener(AsyncListener(fail))
        await blue.subscribe(["orders"])
        with pytest.raises(ValueError, match="bug of the user"):
            await blue.poll(0.1)
        await blue.poll(0.1)
        assert await blue.assignment() == set(EVERYTHING)


async def test_operations_run_while_a_poll_waits(group: FakeGroup) -> None:
    async with await owner(group) as blue:
        polling = asyncio.create_task(blue.poll(LONG_S))
        await asyncio.sleep(0)
        await blue.commit_sync({P0: OffsetAndMetadata(1)})
        await blue.pause([P0])
        assert await blue.paused() == {P0}
        assert not polling.done()
        polling.cancel()
    assert group.committed == {P0: OffsetAndMetadata(1)}


async def test_listener_can_be_set_while_a_poll_waits(group: FakeGroup) -> None:
    listener = AsyncListener()
    async with await owner(group) as blue:
        polling = asyncio.create_task(blue.poll(LONG_S))
        await asyncio.sleep(0)
        await blue.assignment()
        blue.set_rebalance_listener(listener)
        polling.cancel()
    assert listener.calls == [("revoked", set(EVERYTHING))]


async def test_next_poll_begins_after_a_cancelled_poll(group: FakeGroup) -> None:
    async with await owner(group) as blue:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(blue.poll(LONG_S), 0.01)
        await blue.poll(0.1)


async def test_error_of_a_cancelled_poll_is_logged(
    group: FakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    async def cancel_and_fail(callback: str, _consumer: AsyncRebalanceConsumer) -> None:
        if callback == "assigned":
            polling.cancel()
            await asyncio.sleep(0)
            msg = "a bug of the user's"
            raise ValueError(msg)

    async with consumer_of(group) as blue:
        blue.set_rebalance_listener(AsyncListener(cancel_and_fail))
        await blue.subscribe(["orders"])
        polling = asyncio.create_task(blue.poll(LONG_S))
        with pytest.raises(asyncio.CancelledError):
            await polling
        await blue.poll(0.1)
    assert "bug of the user" in caplog.text


async def test_close_ends_a_waiting_poll_and_may_be_repeated(group: FakeGroup) -> None:
    """`metrics` and `member_id` still answer."""
    blue = await owner(group)
    polling = asyncio.create_task(blue.poll(LONG_S))
    await asyncio.sleep(0)
    await blue.close()
    await blue.close()
    assert await polling == []
    with pytest.raises(IllegalStateError, match="closed"):
        await blue.poll(0)
    with pytest.raises(IllegalStateError, match="closed"):
        await blue.assignment()
    assert await blue.metrics() == {"member": {}, "fetcher": {}}
    assert await blue.member_id() == ""


async def test_close_with_a_wrong_time_out_changes_nothing(group: FakeGroup) -> None:
    blue = await owner(group)
    with pytest.raises(TypeError, match="close expects a number of seconds"):
        await blue.close("5")  # type: ignore[arg-type]
    assert await blue.assignment() == set(EVERYTHING)
    await blue.close()
    assert not group.members


def test_close_that_was_cancelled_before_its_turn_can_be_repeated(group: FakeGroup) -> None:
    """The end of an event loop cancels its tasks, and leaves the consumer in the group."""
    consumers: list[AsyncRebalanceAwareConsumer] = []

    async def cancel_close() -> None:
        blue = await owner(group)
        await blue._turn().acquire()  # as a poll of another task does
        closing = asyncio.create_task(blue.close())
        await asyncio.sleep(0)
        assert not closing.done()
        consumers.append(blue)

    asyncio.run(cancel_close())
    assert group.members
    asyncio.run(consumers[0].close())
    assert not group.members


async def test_subscribe_and_unsubscribe_end_waiting_polls(group: FakeGroup) -> None:
    """Later polls wait for their timeout."""
    async with consumer_of(group) as blue:
        polling = asyncio.create_task(blue.poll(-1))
        await asyncio.sleep(0)
        await blue.subscribe(["orders"])
        assert await polling == []
        await blue.poll(0.1)
        assert await blue.assignment() == set(EVERYTHING)
        before = group.clock()
        await blue.poll(5.0)
        assert group.clock() >= before + 5.0
        waiting = [asyncio.create_task(blue.poll(-1)) for _ in range(2)]
        await asyncio.sleep(0)
        await blue.unsubscribe()
        assert await asyncio.gather(*waiting) == [[], []]
        assert not group.members


async def test_plain_callbacks_run_in_the_thread_of_the_consumer(group: FakeGroup) -> None:
    threads: list[int] = []

    def assigned(partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
        assert set(partitions) == consumer.assignment()
        threads.append(threading.get_ident())

    def revoked(partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
        consumer.commit_sync(dict.fromkeys(partitions, OffsetAndMetadata(2)))

    async with await owner(group, Listener(assigned, revoked)):
        assert threads != [threading.get_ident()]
    assert group.committed == dict.fromkeys(EVERYTHING, OffsetAndMetadata(2))


async def test_listener_with_a_callback_that_is_no_coroutine_is_refused(group: FakeGroup) -> None:
    class Mixed(AsyncListener):
        def on_partitions_lost(  # type: ignore[override]
            self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
        ) -> None: ...

    async with consumer_of(group) as blue:
        with pytest.raises(IllegalStateError, match="not a coroutine function"):
            blue.set_rebalance_listener(Mixed())


@pytest.mark.parametrize("is_coroutine", [False, True])
async def test_commit_callback_runs_in_the_event_loop(
    group: FakeGroup, *, is_coroutine: bool
) -> None:
    answers: list[tuple[set[TopicPartition], type[BrokerError] | None, int]] = []

    def plain(offsets: Collection[TopicPartition], error: BrokerError | None) -> None:
        answers.append((set(offsets), type(error) if error else None, threading.get_ident()))

    async def coroutine(offsets: Collection[TopicPartition], error: BrokerError | None) -> None:
        await asyncio.sleep(0)
        plain(offsets, error)

    foreign = TopicPartition("orders", 9)
    async with await owner(group) as blue:
        callback = coroutine if is_coroutine else plain
        await blue.commit_async({P0: OffsetAndMetadata(3)}, callback)
        await blue.commit_async({foreign: OffsetAndMetadata(3)}, callback)
        await blue.poll(0.1)
    assert answers == [
        ({P0}, None, threading.get_ident()),
        ({foreign}, PartitionLostError, threading.get_ident()),
    ]
