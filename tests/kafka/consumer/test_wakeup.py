"""Ends of a poll: `wakeup`, timeouts, iteration, and refused calls of other threads."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.kafka.aio.async_consumer import AsyncRebalanceAwareConsumer
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.kafka.consumers import CONFIG, P0, Listener, consumer_of
from tests.kafka.fake_log import FakeLog, fake_log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import FrameType

    from confluent_kafka import Message
    from confluent_kafka import TopicPartition as ClientPartition

    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer

LONG_S = 1e9


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup({"orders": 1})


@pytest.fixture
def log(group: FakeGroup, monkeypatch: pytest.MonkeyPatch) -> FakeLog:
    """Five records."""
    return fake_log(group, monkeypatch, {0: 5})


def reading(group: FakeGroup) -> RebalanceAwareConsumer:
    return consumer_of(group, fetch=True)


def play(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 20))


@pytest.mark.usefixtures("log")
def test_iteration_commits_returned_records_only_and_ends_with_a_wakeup(group: FakeGroup) -> None:
    consumer = reading(group)
    read = []
    for record in consumer:
        read.append(record.offset())
        consumer.commit_sync()
        assert group.committed == {P0: OffsetAndMetadata(len(read), leader_epoch=3)}
        if len(read) == 3:
            consumer.wakeup()
    assert read == [0, 1, 2]
    assert next(consumer).offset() == 3


def test_iteration_without_records_restarts_no_partition(
    group: FakeGroup, log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the end marker of a transaction, the client's position is after the last record.

    Each poll that returns nothing would otherwise drop the fetched records.
    """
    consumer = reading(group)
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


def test_iteration_without_records_completes_revokes() -> None:
    group = FakeGroup({"orders": 2})
    blue = consumer_of(group)
    blue.set_rebalance_listener(Listener(revoked=lambda *_: blue.wakeup()))
    blue.poll(0)
    green = consumer_of(group)
    green.poll(0)
    assert list(blue) == []
    green.poll(0)
    assert len(blue.assignment()) == len(green.assignment()) == 1


@pytest.mark.usefixtures("log")
def test_asyncio_iteration_ends_with_a_wakeup_and_with_a_close(group: FakeGroup) -> None:

    async def use() -> None:
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

    play(use())


@pytest.mark.usefixtures("log")
def test_asyncio_iteration_continues_when_another_task_subscribes(group: FakeGroup) -> None:
    """Its poll returns early for that task."""

    async def use() -> None:
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

    play(use())


@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.usefixtures("log")
def test_wakeup_ends_the_next_poll_only(group: FakeGroup, fetch: bool) -> None:  # noqa: FBT001
    consumer = consumer_of(group, fetch=fetch)
    consumer.poll(0)
    before = group.clock()
    consumer.wakeup()
    assert consumer.poll(LONG_S) == []
    assert group.clock() == before
    consumer.poll(3.0)
    assert group.clock() >= before + 3.0


@pytest.mark.parametrize("timeout_s", [-1, LONG_S])
def test_wakeup_from_another_thread_ends_a_waiting_poll(
    group: FakeGroup, log: FakeLog, timeout_s: float
) -> None:
    consumer = reading(group)
    consumer.poll(0)

    def wake() -> None:
        assert log.is_waiting.wait(120)
        consumer.wakeup()

    waker = threading.Thread(target=wake)
    log.is_waiting.clear()
    waker.start()
    assert consumer.poll(timeout_s) == []
    waker.join()


@pytest.mark.usefixtures("log")
def test_refused_poll_of_another_thread_does_not_consume_a_wakeup(group: FakeGroup) -> None:
    consumer = reading(group)
    consumer.poll(0)
    with consumer._state.guard.exclusive("poll"):
        consumer.wakeup()
        assert "another thread is in poll" in refusal_elsewhere(lambda: consumer.poll(0))
    before = group.clock()
    consumer.poll(LONG_S)
    assert group.clock() == before


def test_poll_time_out_has_a_default_and_confluents_name(group: FakeGroup) -> None:
    consumer = consumer_of(group)
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


def test_single_record_is_returned_at_once(group: FakeGroup, log: FakeLog) -> None:
    """The client waits for as many records as it is asked for, so the fetcher asks for one."""
    consumer = reading(group)
    assert len(consumer.poll(LONG_S, 50)) == 5
    log.produce_while_waiting(P0)
    assert [record.offset() for record in consumer.poll(LONG_S, 50)] == [5]
    assert all(count == 1 for count, timeout_s in log.waits if timeout_s)


def test_full_batch_takes_one_call_of_the_client(group: FakeGroup, log: FakeLog) -> None:
    consumer = reading(group)
    consumer.poll(0, 2)
    log.waits.clear()
    assert len(consumer.poll(1.0, 2)) == 2
    assert log.waits == [(2, 0.0)]


def refusal_elsewhere(call: Callable[[], object]) -> str:
    """The error of the call in another thread."""
    refused: list[str] = []

    def use() -> None:
        with pytest.raises(IllegalStateError) as caught:
            call()
        refused.append(str(caught.value))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    return refused[0]


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
def test_operation_of_another_thread_is_refused_during_a_poll(group: FakeGroup, name: str) -> None:
    consumer = reading(group)
    consumer.poll(0)
    with consumer._state.guard.exclusive("poll"):
        refusal = refusal_elsewhere(lambda: OPERATIONS[name](consumer))
    assert refusal.startswith(f"{name} while another thread is in poll: ")
    assert "wakeup" in refusal
    assert not group.committed
    assert not consumer.paused()
    OPERATIONS[name](consumer)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.usefixtures("log")
def test_operation_after_close_is_refused(group: FakeGroup, name: str) -> None:
    consumer = reading(group)
    consumer.poll(0)
    consumer.close()
    if name == "close":
        consumer.close()
    else:
        with pytest.raises(IllegalStateError, match=f"{name} on a closed consumer"):
            OPERATIONS[name](consumer)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.usefixtures("log")
def test_operation_in_a_fork_is_refused(
    group: FakeGroup, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads are missing, so a call would not return; `close` leaves the membership alone."""
    consumer = reading(group)
    consumer.poll(0)
    with monkeypatch.context() as fork:
        fork.setattr(consumer._state.guard, "is_forked", True)
        with pytest.raises(IllegalStateError, match=r"poll on .* create a consumer here"):
            consumer.poll(0)
        if name == "close":
            consumer.close()
        else:
            with pytest.raises(IllegalStateError, match=rf"{name} on .* create a consumer here"):
                OPERATIONS[name](consumer)
    assert group.members


def test_asyncio_operation_in_a_fork_is_refused(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = AsyncRebalanceAwareConsumer(
        CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )

    async def use() -> None:
        with pytest.raises(IllegalStateError, match="create one here"):
            await consumer.poll(0)
        with pytest.raises(IllegalStateError, match="create one here"):
            await consumer.assignment()
        await consumer.close()

    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        fork.setattr(consumer._consumer._state.guard, "is_forked", True)
        play(use())


def test_close_in_a_signal_handler_is_refused_in_favour_of_wakeup(
    group: FakeGroup, log: FakeLog
) -> None:
    consumer = reading(group)
    consumer.poll(0)
    refused: list[str] = []

    def handle(_number: int, _frame: FrameType | None) -> None:
        with pytest.raises(IllegalStateError) as caught:
            consumer.close()
        refused.append(str(caught.value))
        consumer.wakeup()

    before = signal.signal(signal.SIGUSR1, handle)

    def interrupt() -> None:
        assert log.is_waiting.wait(120)
        signal.raise_signal(signal.SIGUSR1)

    killer = threading.Thread(target=interrupt)
    log.is_waiting.clear()
    killer.start()
    consumer.poll(LONG_S)
    killer.join()
    signal.signal(signal.SIGUSR1, before)
    (refusal,) = refused
    assert refusal.startswith("close in a signal handler or callback that interrupts poll: call wa")
