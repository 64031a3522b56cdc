"""The consumer for asyncio on a fake group.

The tests cover what is awaited, what goes through meanwhile, and that nothing waits for itself.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

import pytest

from dagster_rebalance.core.model.errors import IllegalStateError, PartitionLostError
from dagster_rebalance.core.model.events import LostReason, PartitionsLost
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.aio.async_consumer import AsyncRebalanceAwareConsumer
from dagster_rebalance.kafka.aio.async_operations import AsyncRebalanceListener
from dagster_rebalance.kafka.consumer.listener import RebalanceListener
from dagster_rebalance.testing.fake_group import FakeGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine
    from typing import Any

    from dagster_rebalance.core.model.errors import BrokerError
    from dagster_rebalance.kafka.aio.async_operations import AsyncRebalanceConsumer
    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer

T = TypeVar("T")

CONFIG = {"bootstrap.servers": "nobody:9092", "group.id": "etl"}
P0, P1, P2, P3 = EVERYTHING = tuple(TopicPartition("orders", number) for number in range(4))
LONG_S = 1e9


@pytest.fixture
def group() -> FakeGroup:
    """A group without members, with a topic of four partitions."""
    return FakeGroup({"orders": 4})


def consumer_of(group: FakeGroup) -> AsyncRebalanceAwareConsumer:
    """A consumer on the fake group."""
    return AsyncRebalanceAwareConsumer(
        CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )


async def alone(
    group: FakeGroup, listener: AsyncRebalanceListener | RebalanceListener | None = None
) -> AsyncRebalanceAwareConsumer:
    """A consumer that owns all partitions."""
    consumer = consumer_of(group)
    consumer.set_rebalance_listener(listener)
    await consumer.subscribe(["orders"])
    await consumer.poll(0.1)
    return consumer


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run in an event loop; what hangs is a failure."""
    return asyncio.run(asyncio.wait_for(coroutine, 20))


class Diary(AsyncRebalanceListener):
    """Notes each callback, and awaits something of the test's in it."""

    def __init__(
        self, during: Callable[[str, AsyncRebalanceConsumer], Awaitable[None]] | None = None
    ) -> None:
        self.lines: list[tuple[str, set[TopicPartition]]] = []
        self.during = during
        self.threads: set[int] = set()
        self.views: list[AsyncRebalanceConsumer] = []

    async def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        """Note it."""
        await self._note("assigned", partitions, consumer)

    async def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        """Note it."""
        await self._note("revoked", partitions, consumer)

    async def _note(
        self, what: str, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        self.lines.append((what, set(partitions)))
        self.threads.add(threading.get_ident())
        self.views.append(consumer)
        if self.during is not None:
            await self.during(what, consumer)


def test_a_revoke_is_delayed_and_completed_as_without_asyncio(group: FakeGroup) -> None:
    """The lists of KIP-983 are the same."""

    async def play() -> None:
        async with await alone(group) as blue, consumer_of(group) as green:
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

    run(play())


def test_callbacks_that_are_coroutines_are_awaited_in_the_event_loop(group: FakeGroup) -> None:
    """With a view whose operations are awaited, and which ends with the callback."""

    async def during(what: str, view: AsyncRebalanceConsumer) -> None:
        await asyncio.sleep(0)
        assert await view.assignment() == set(EVERYTHING)
        if what == "revoked":
            await view.commit_sync({P0: OffsetAndMetadata(9)})

    diary = Diary(during)

    async def play() -> None:
        async with await alone(group, diary):
            with pytest.raises(IllegalStateError, match="ended with its callback"):
                await diary.views[0].assignment()
        assert diary.threads == {threading.get_ident()}

    run(play())
    assert diary.lines == [("assigned", set(EVERYTHING)), ("revoked", set(EVERYTHING))]
    assert group.committed == {P0: OffsetAndMetadata(9)}


def test_a_loss_is_a_revoke_for_coroutines_that_do_not_tell_them_apart(group: FakeGroup) -> None:
    """The default of `on_partitions_lost`."""
    diary = Diary()

    async def play() -> None:
        async with await alone(group, diary) as blue:
            group.fence(group.members[0])
            told = await blue.poll_with_rebalance(1.0)
            assert await blue.get_lost_partitions() == set(EVERYTHING)
            assert told.events == (PartitionsLost(EVERYTHING, LostReason.SESSION),)

    run(play())
    assert diary.lines[1] == ("revoked", set(EVERYTHING))


def test_a_callback_may_wait_for_a_worker_that_commits(group: FakeGroup) -> None:
    """A callback under asyncio must be able to call the consumer.

    KIP-983: with asyncio "the single-thread consumer lock makes it very hard to call the consumer
    from the callback".
    """
    may_finish = asyncio.Event()

    async def play() -> None:
        async def work() -> None:
            await may_finish.wait()
            await blue.commit_sync({P1: OffsetAndMetadata(4)})

        async def drain(what: str, _view: AsyncRebalanceConsumer) -> None:
            if what == "revoked":
                may_finish.set()
                await worker

        blue = await alone(group, Diary(drain))
        worker = asyncio.create_task(work())
        await blue.close()

    run(play())
    assert group.committed == {P1: OffsetAndMetadata(4)}


@pytest.mark.parametrize(
    "call", ["poll", "poll_with_rebalance", "close", "unsubscribe", "subscribe"]
)
def test_what_would_wait_for_itself_is_refused_in_a_callback(group: FakeGroup, call: str) -> None:
    """It must not hang; afterwards the same task may poll again."""
    refused: list[str] = []

    async def play() -> None:
        async def nest(_what: str, _view: AsyncRebalanceConsumer) -> None:
            arguments: list[object] = (
                [0] if call.startswith("poll") else [["orders"]] if call == "subscribe" else []
            )
            try:
                await getattr(blue, call)(*arguments)
            except IllegalStateError as error:
                refused.append(str(error))

        blue = consumer_of(group)
        blue.set_rebalance_listener(Diary(nest))
        await blue.subscribe(["orders"])
        await blue.poll(0.1)
        await blue.poll(0.1)
        blue.set_rebalance_listener(None)
        await blue.close()

    run(play())
    assert refused == [
        f"{call.removesuffix('_with_rebalance')} inside a rebalance callback: return from it first"
    ]


@pytest.mark.parametrize("call", ["poll", "close", "unsubscribe"])
def test_what_would_wait_for_itself_is_refused_in_the_callback_of_a_commit(
    group: FakeGroup, call: str
) -> None:
    """The poll that calls it back would wait for it, and the close after it for that poll."""
    refused: list[str] = []

    async def play() -> None:
        async def nest(_offsets: object, _error: BrokerError | None) -> None:
            try:
                await getattr(blue, call)()
            except IllegalStateError as error:
                refused.append(str(error))

        blue = await alone(group)
        await blue.commit_async({P0: OffsetAndMetadata(3)}, nest)
        await blue.poll(0.1)
        await blue.close()

    run(play())
    assert refused == [f"{call} inside a rebalance callback: return from it first"]


def test_an_exception_of_a_coroutine_reaches_the_caller_of_poll_once(group: FakeGroup) -> None:
    """As without asyncio."""

    async def fail(what: str, _view: AsyncRebalanceConsumer) -> None:
        if what == "assigned":
            msg = "a bug of the user's"
            raise ValueError(msg)

    async def play() -> None:
        async with consumer_of(group) as blue:
            blue.set_rebalance_listener(Diary(fail))
            await blue.subscribe(["orders"])
            with pytest.raises(ValueError, match="bug of the user"):
                await blue.poll(0.1)
            await blue.poll(0.1)
            assert await blue.assignment() == set(EVERYTHING)

    run(play())


def test_operations_go_through_while_a_poll_waits(group: FakeGroup) -> None:
    """A worker need not wait for the time-out of somebody's poll."""

    async def play() -> None:
        async with await alone(group) as blue:
            polling = asyncio.create_task(blue.poll(LONG_S))
            await asyncio.sleep(0)
            await blue.commit_sync({P0: OffsetAndMetadata(1)})
            await blue.pause([P0])
            assert await blue.paused() == {P0}
            assert not polling.done()
            polling.cancel()

    run(play())
    assert group.committed == {P0: OffsetAndMetadata(1)}


def test_a_listener_can_be_set_while_a_poll_waits(group: FakeGroup) -> None:
    """It is only noted for the next poll, so nobody's turn is needed."""
    diary = Diary()

    async def play() -> None:
        async with await alone(group) as blue:
            polling = asyncio.create_task(blue.poll(LONG_S))
            await asyncio.sleep(0)
            await blue.assignment()
            blue.set_rebalance_listener(diary)
            polling.cancel()

    run(play())
    assert diary.lines == [("revoked", set(EVERYTHING))]


def test_a_cancelled_poll_ends_and_the_next_one_begins(group: FakeGroup) -> None:
    """`asyncio.wait_for` is how time-outs are written."""

    async def play() -> None:
        async with await alone(group) as blue:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(blue.poll(LONG_S), 0.01)
            await blue.poll(0.1)

    run(play())


def test_what_fails_after_its_caller_has_left_is_logged(
    group: FakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is there to raise it to, and it must not be swallowed."""

    async def play() -> None:
        async def leave_and_fail(what: str, _view: AsyncRebalanceConsumer) -> None:
            if what == "assigned":
                polling.cancel()
                await asyncio.sleep(0)
                msg = "a bug of the user's"
                raise ValueError(msg)

        async with consumer_of(group) as blue:
            blue.set_rebalance_listener(Diary(leave_and_fail))
            await blue.subscribe(["orders"])
            polling = asyncio.create_task(blue.poll(LONG_S))
            with pytest.raises(asyncio.CancelledError):
                await polling
            await blue.poll(0.1)

    run(play())
    assert "bug of the user" in caplog.text


def test_close_ends_a_poll_that_waits(group: FakeGroup) -> None:
    """A shutdown must not wait for a time-out; closing twice is closing once."""

    async def play() -> None:
        blue = await alone(group)
        polling = asyncio.create_task(blue.poll(LONG_S))
        await asyncio.sleep(0)
        await blue.close()
        await blue.close()
        assert await polling == []
        with pytest.raises(IllegalStateError, match="closed"):
            await blue.poll(0)
        with pytest.raises(IllegalStateError, match="closed"):
            await blue.assignment()

    run(play())


def test_a_close_with_a_refused_time_out_changes_nothing(group: FakeGroup) -> None:
    """The next one must not raise the same again, or the member would stay for good."""

    async def play() -> None:
        blue = await alone(group)
        with pytest.raises(TypeError, match="close expects a number of seconds"):
            await blue.close("5")  # type: ignore[arg-type]
        assert await blue.assignment() == set(EVERYTHING)
        await blue.close()
        assert not group.members

    run(play())


def test_a_close_that_was_cancelled_before_its_turn_can_be_called_again(group: FakeGroup) -> None:
    """The end of an event loop cancels all of its tasks, and leaves the consumer a member."""

    async def play() -> AsyncRebalanceAwareConsumer:
        blue = await alone(group)
        await blue._turn().acquire()  # as a poll of another task has it
        closing = asyncio.create_task(blue.close())
        await asyncio.sleep(0)
        assert not closing.done()
        return blue

    blue = run(play())
    assert group.members
    run(blue.close())
    assert not group.members


def test_what_only_reads_still_answers_after_the_end(group: FakeGroup) -> None:
    """As without asyncio: a last look at the metrics belongs to a shutdown."""

    async def play() -> None:
        blue = await alone(group)
        await blue.close()
        assert await blue.metrics() == {"member": {}, "fetcher": {}}
        assert await blue.member_id() == ""

    run(play())


def test_subscribing_and_unsubscribing_end_a_poll_that_waits(group: FakeGroup) -> None:
    """A poll without end that began before the subscription would wait for it, and it for the poll.

    The polls that come later wait as long as they are told.
    """

    async def play() -> None:
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

    run(play())


def test_plain_callbacks_run_in_the_consumers_thread(group: FakeGroup) -> None:
    """Listeners that exist can be used as they are."""

    class Plain(RebalanceListener):
        def __init__(self) -> None:
            self.threads: list[int] = []

        def on_partitions_assigned(
            self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
        ) -> None:
            assert set(partitions) == consumer.assignment()
            self.threads.append(threading.get_ident())

        def on_partitions_revoked(
            self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
        ) -> None:
            consumer.commit_sync(dict.fromkeys(partitions, OffsetAndMetadata(2)))

    plain = Plain()

    async def play() -> None:
        async with await alone(group, plain):
            assert plain.threads != [threading.get_ident()]

    run(play())
    assert group.committed == dict.fromkeys(EVERYTHING, OffsetAndMetadata(2))


def test_a_listener_whose_callbacks_are_not_all_coroutines_is_refused(group: FakeGroup) -> None:
    """One of them would be awaited in vain."""

    class Mixed(Diary):
        def on_partitions_lost(  # type: ignore[override]
            self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
        ) -> None: ...

    async def play() -> None:
        async with consumer_of(group) as blue:
            with pytest.raises(IllegalStateError, match="no coroutine"):
                blue.set_rebalance_listener(Mixed())

    run(play())


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_the_callback_of_a_commit_runs_in_the_event_loop(group: FakeGroup, kind: str) -> None:
    """Whether it is a coroutine or not."""
    answers: list[tuple[set[TopicPartition], type[BrokerError] | None, int]] = []

    def plain(offsets: Collection[TopicPartition], error: BrokerError | None) -> None:
        answers.append((set(offsets), type(error) if error else None, threading.get_ident()))

    async def coroutine(offsets: Collection[TopicPartition], error: BrokerError | None) -> None:
        await asyncio.sleep(0)
        plain(offsets, error)

    async def play() -> None:
        async with await alone(group) as blue:
            callback = plain if kind == "plain" else coroutine
            await blue.commit_async({P0: OffsetAndMetadata(3)}, callback)
            await blue.commit_async({TopicPartition("orders", 9): OffsetAndMetadata(3)}, callback)
            await blue.poll(0.1)
        assert answers == [
            ({P0}, None, threading.get_ident()),
            ({TopicPartition("orders", 9)}, PartitionLostError, threading.get_ident()),
        ]

    run(play())
