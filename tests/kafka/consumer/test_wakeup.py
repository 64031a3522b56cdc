"""How a wait for records ends: iteration, `wakeup`, time-outs, and a record that comes alone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.aio.async_consumer import AsyncRebalanceAwareConsumer
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.consumer.listener import RebalanceListener
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.kafka.fake_log import FakeLog, fake_log

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import FrameType

    from confluent_kafka import Message
    from confluent_kafka import TopicPartition as ClientPartition

    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer

CONFIG = {"bootstrap.servers": "nobody:9092", "group.id": "etl"}
P0 = TopicPartition("orders", 0)
LONG_S = 1e9


@pytest.fixture
def group() -> FakeGroup:
    """A group without members."""
    return FakeGroup({"orders": 1})


@pytest.fixture
def log(group: FakeGroup, monkeypatch: pytest.MonkeyPatch) -> FakeLog:
    """Five records."""
    return fake_log(group, monkeypatch, {0: 5})


def consumer_of(group: FakeGroup, *, fetch: bool = True) -> RebalanceAwareConsumer:
    """A consumer that has subscribed."""
    consumer = RebalanceAwareConsumer(
        CONFIG, fetch=fetch, member=group.member(), cluster=group, clock=group.clock
    )
    consumer.subscribe(["orders"])
    return consumer


@pytest.mark.usefixtures("log")
def test_iterating_commits_what_was_returned_and_ends_with_a_wakeup(group: FakeGroup) -> None:
    """With the offsets of records that were read ahead, a commit would cover unseen records.

    It must be possible to end a loop from elsewhere.
    """
    consumer = consumer_of(group)
    read = []
    for record in consumer:
        read.append(record.offset())
        consumer.commit_sync()
        assert group.committed == {P0: OffsetAndMetadata(len(read), leader_epoch=3)}
        if len(read) == 3:
            consumer.wakeup()
    assert read == [0, 1, 2]
    assert next(consumer).offset() == 3


def test_iterating_where_no_record_comes_begins_no_partition_anew(
    group: FakeGroup, log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the mark of a transaction the client is further than the last record.

    What it has fetched would be dropped with each poll that returns nothing.
    """
    consumer = consumer_of(group)
    begun, polls = [], []
    position, assign, consume = log.position, log.incremental_assign, log.consume

    def behind_a_mark(partitions: list[ClientPartition]) -> list[ClientPartition]:
        found = position(partitions)
        for tp in found:
            tp.offset += tp.offset == 5
        return found

    def counted(partitions: list[ClientPartition]) -> None:
        begun.extend(partitions)
        assign(partitions)

    def woken(num_messages: int, timeout: float) -> list[Message]:
        polls.append(timeout)
        if len(polls) > 50:
            consumer.wakeup()
        return consume(num_messages, timeout)

    monkeypatch.setattr(log, "position", behind_a_mark)
    monkeypatch.setattr(log, "incremental_assign", counted)
    monkeypatch.setattr(log, "consume", woken)
    assert [record.offset() for record in consumer] == [0, 1, 2, 3, 4]
    assert len(begun) == 1


class WakeOnRevoke(RebalanceListener):
    """Ends the iteration when a revoke is completed."""

    def __init__(self, consumer: RebalanceAwareConsumer) -> None:
        self._consumer = consumer

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Nothing to do."""

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Wake."""
        self._consumer.wakeup()


def test_iterating_gives_partitions_up_where_no_record_comes() -> None:
    """Each of its polls tells nobody, and the next one must not wait for a delay."""
    group = FakeGroup({"orders": 2})
    blue = consumer_of(group, fetch=False)
    blue.set_rebalance_listener(WakeOnRevoke(blue))
    blue.poll(0)
    green = consumer_of(group, fetch=False)
    green.poll(0)
    assert list(blue) == []
    green.poll(0)
    assert len(blue.assignment()) == len(green.assignment()) == 1


@pytest.mark.usefixtures("log")
def test_iterating_in_asyncio_ends_with_a_wakeup_and_with_a_close(group: FakeGroup) -> None:
    """As without asyncio; and a close from another task ends it without an error."""

    async def play() -> None:
        consumer = AsyncRebalanceAwareConsumer(
            CONFIG, member=group.member(), cluster=group, clock=group.clock
        )
        await consumer.subscribe(["orders"])
        read = []
        async for record in consumer:
            read.append(record.offset())
            if len(read) == 3:
                await consumer.wakeup()
        assert read == [0, 1, 2]

        async def read_on() -> None:
            async for record in consumer:
                read.append(record.offset())
                if len(read) == 5:
                    has_read.set()

        has_read = asyncio.Event()
        reading = asyncio.create_task(read_on())
        await has_read.wait()
        await consumer.close()
        await reading
        assert read == [0, 1, 2, 3, 4]

    asyncio.run(asyncio.wait_for(play(), 20))


@pytest.mark.usefixtures("log")
def test_iterating_in_asyncio_goes_on_when_another_task_subscribes(group: FakeGroup) -> None:
    """Its poll returns early to let that task through, and no record is missing."""

    async def play() -> None:
        consumer = AsyncRebalanceAwareConsumer(
            CONFIG, member=group.member(), cluster=group, clock=group.clock
        )
        read = []

        async def read_on() -> None:
            async for record in consumer:
                read.append(record.offset())
                if len(read) == 5:
                    await consumer.wakeup()

        reading = asyncio.create_task(read_on())
        await asyncio.sleep(0)
        await consumer.subscribe(["orders"])
        await reading
        assert read == [0, 1, 2, 3, 4]
        await consumer.close()

    asyncio.run(asyncio.wait_for(play(), 20))


@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.usefixtures("log")
def test_a_wakeup_ends_the_next_poll_and_only_that(group: FakeGroup, fetch: bool) -> None:  # noqa: FBT001
    """It may come between two polls, and must not be missed."""
    consumer = consumer_of(group, fetch=fetch)
    consumer.poll(0)
    before = group.clock()
    consumer.wakeup()
    assert consumer.poll(LONG_S) == []
    assert group.clock() == before
    consumer.poll(3.0)
    assert group.clock() >= before + 3.0


@pytest.mark.parametrize("timeout_s", [-1, LONG_S])
def test_a_wakeup_from_another_thread_ends_a_poll_that_waits(
    group: FakeGroup, log: FakeLog, timeout_s: float
) -> None:
    """A time-out below 0 is without end, as in confluent-kafka."""
    consumer = consumer_of(group)
    consumer.poll(0)

    def wake() -> None:
        assert log.is_waiting.wait(10)
        consumer.wakeup()

    waker = threading.Thread(target=wake)
    log.is_waiting.clear()
    waker.start()
    assert consumer.poll(timeout_s) == []
    waker.join()


@pytest.mark.usefixtures("log")
def test_a_refused_poll_of_another_thread_does_not_use_a_wakeup_up(group: FakeGroup) -> None:
    """It is meant for the poll of the owner."""
    consumer = consumer_of(group)
    consumer.poll(0)
    with consumer._state.guard.exclusive("poll"):
        consumer.wakeup()
        assert "another thread is in poll" in refusal_elsewhere(lambda: consumer.poll(0))
    before = group.clock()
    consumer.poll(LONG_S)
    assert group.clock() == before


def test_time_outs_have_a_default_and_confluents_name(group: FakeGroup) -> None:
    """`poll()` waits a second, `poll(1.0)` and `poll(timeout=1.0)` too."""
    consumer = consumer_of(group, fetch=False)
    consumer.poll(0)
    for call in (
        consumer.poll,
        lambda: consumer.poll(1.0),
        lambda: consumer.poll(timeout=1.0),
        lambda: consumer.poll(timeout_s=1.0),
        consumer.poll_with_rebalance,
        lambda: consumer.poll_with_rebalance(timeout=1.0),
    ):
        before = group.clock()
        call()
        assert group.clock() - before == pytest.approx(1.0)


def test_a_record_that_comes_alone_is_not_kept_waiting(group: FakeGroup, log: FakeLog) -> None:
    """The client waits until it has as many records as it is asked for.

    The fetcher therefore never asks it to wait for more than one.
    """
    consumer = consumer_of(group)
    assert len(consumer.poll(LONG_S, 50)) == 5
    log.produce_while_waiting("orders", 0, 1)
    assert [record.offset() for record in consumer.poll(LONG_S, 50)] == [5]
    assert all(count == 1 for count, timeout_s in log.waits if timeout_s)


def test_a_full_batch_takes_one_call(group: FakeGroup, log: FakeLog) -> None:
    """At full speed nothing is waited for, and a call costs."""
    consumer = consumer_of(group)
    consumer.poll(0, 2)
    log.waits.clear()
    assert len(consumer.poll(1.0, 2)) == 2
    assert log.waits == [(2, 0.0)]


def refusal_elsewhere(call: Callable[[], object]) -> str:
    """What another thread is told."""
    told: list[str] = []

    def use() -> None:
        with pytest.raises(IllegalStateError) as refused:
            call()
        told.append(str(refused.value))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    return told[0]


OPERATIONS: dict[str, Callable[[RebalanceAwareConsumer], object]] = {
    "commit_sync": lambda c: c.commit_sync({P0: OffsetAndMetadata(1)}),
    "commit_async": lambda c: c.commit_async({P0: OffsetAndMetadata(1)}),
    "commit_offsets": lambda c: c.commit_offsets({P0: OffsetAndMetadata(1)}),
    "committed": lambda c: c.committed([P0]),
    "position": lambda c: c.position(P0),
    "seek": lambda c: c.seek(P0, 2),
    "seek_to_end": lambda c: c.seek_to_end([P0]),
    "pause": lambda c: c.pause([P0]),
    "resume_all": lambda c: c.resume_all(),
    "assignment": lambda c: c.assignment(),
    "delay_revoke": lambda c: c.delay_revoke([P0]),
    "end_offsets": lambda c: c.end_offsets([P0]),
    "get_lost_partitions": lambda c: c.get_lost_partitions(),
    "close": lambda c: c.close(),
    "subscribe": lambda c: c.subscribe(["orders"]),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.usefixtures("log")
def test_another_thread_is_refused_while_a_poll_runs(group: FakeGroup, name: str) -> None:
    """No release waits for a commit from another thread, and it may come after the release.

    Apache's consumer refuses it likewise.
    """
    consumer = consumer_of(group)
    consumer.poll(0)
    with consumer._state.guard.exclusive("poll"):
        told = refusal_elsewhere(lambda: OPERATIONS[name](consumer))
    assert told.startswith(f"{name} while another thread is in poll: ")
    assert "wakeup" in told
    assert not group.committed
    assert not consumer.paused()
    OPERATIONS[name](consumer)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.usefixtures("log")
def test_after_the_end_each_call_says_that_it_is_over(group: FakeGroup, name: str) -> None:
    """Not that a partition was lost, which means something else."""
    consumer = consumer_of(group)
    consumer.poll(0)
    consumer.close()
    if name == "close":
        consumer.close()
    else:
        with pytest.raises(IllegalStateError, match=f"{name} on a closed consumer"):
            OPERATIONS[name](consumer)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.usefixtures("log")
def test_in_a_fork_each_call_says_to_make_a_consumer_there(
    group: FakeGroup, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork lacks the threads that would answer, so the calls waited for ever.

    A close there leaves the membership of the other process alone.
    """
    consumer = consumer_of(group)
    consumer.poll(0)
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        with pytest.raises(IllegalStateError, match=r"poll on .* make a consumer here"):
            consumer.poll(0)
        if name == "close":
            consumer.close()
        else:
            with pytest.raises(IllegalStateError, match=rf"{name} on .* make a consumer here"):
                OPERATIONS[name](consumer)
    assert group.members


def test_in_a_fork_a_consumer_of_asyncio_refuses_likewise(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own thread is not there either."""
    consumer = AsyncRebalanceAwareConsumer(
        CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )

    async def use() -> None:
        with pytest.raises(IllegalStateError, match="make one here"):
            await consumer.poll(0)
        with pytest.raises(IllegalStateError, match="make one here"):
            await consumer.assignment()
        await consumer.close()

    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        asyncio.run(asyncio.wait_for(use(), 20))


def test_a_close_in_a_signal_handler_says_what_to_do_there(group: FakeGroup, log: FakeLog) -> None:
    """It is no rebalance callback; `wakeup` is what works in a handler."""
    consumer = consumer_of(group)
    consumer.poll(0)
    told: list[str] = []

    def handle(_number: int, _frame: FrameType | None) -> None:
        with pytest.raises(IllegalStateError) as refused:
            consumer.close()
        told.append(str(refused.value))
        consumer.wakeup()

    before = signal.signal(signal.SIGUSR1, handle)

    def interrupt() -> None:
        assert log.is_waiting.wait(10)
        signal.raise_signal(signal.SIGUSR1)

    killer = threading.Thread(target=interrupt)
    log.is_waiting.clear()
    killer.start()
    consumer.poll(LONG_S)
    killer.join()
    signal.signal(signal.SIGUSR1, before)
    assert told == [
        (
            "close in a signal handler or callback that interrupts poll: call wakeup() there, and "
            "close once it has returned"
        ),
    ]
