"""Several tasks poll and some polls are cancelled: no record is lost or repeated."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.kafka.aio.async_consumer import AsyncRebalanceAwareConsumer
from dagster_rebalance.kafka.aio.async_operations import AsyncRebalanceListener
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.kafka.consumers import CONFIG, P0
from tests.kafka.fake_log import fake_log
from tests.kafka.readers import CommitOnRevoke

if TYPE_CHECKING:
    from confluent_kafka import Message

RECORDS = {0: 40, 1: 7, 2: 0, 3: 23}

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("poll"), st.integers(1, 9)),
        st.tuples(st.just("next"), st.integers(1, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 4)),
        # The thread of the consumer works, and its records wait for a task that may be cancelled.
        st.tuples(st.just("work"), st.just(0)),
        st.tuples(st.just("turn"), st.integers(1, 4)),
    ),
    max_size=40,
)


class Tasks:
    """Tasks that poll, and the records that they got."""

    def __init__(self, consumer: AsyncRebalanceAwareConsumer) -> None:
        self._consumer = consumer
        self._polling: deque[asyncio.Task[None]] = deque()
        self.read: dict[int, list[int]] = {number: [] for number in RECORDS}

    async def play(self, steps: list[tuple[str, int]]) -> None:
        for what, number in steps:
            match what:
                case "poll":
                    self._polling.append(asyncio.create_task(self._poll(number)))
                case "next":
                    self._polling.append(asyncio.create_task(self._iterate(number)))
                case "cancel" if number < len(self._polling):
                    self._polling[number].cancel()
                case "work":
                    self._consumer._owner.submit(lambda: None, nested=False).result(120)
                case _:
                    for _ in range(number):
                        await asyncio.sleep(0)

    async def read_the_rest(self) -> None:
        """Wait for the tasks, and read to the end."""
        while not all(task.done() for task in self._polling):
            await self._consumer.wakeup()
            await asyncio.sleep(0)
        for task in self._polling:
            with contextlib.suppress(asyncio.CancelledError):
                task.result()
        before = -1
        while before != (before := sum(map(len, self.read.values()))):
            await self._poll(50)

    async def _iterate(self, count: int) -> None:
        with contextlib.suppress(StopAsyncIteration):
            for _ in range(count):
                record = await anext(self._consumer)
                self.read[record.partition() or 0].append(record.offset() or 0)

    async def _poll(self, max_records: int) -> None:
        for record in await self._consumer.poll(0.05, max_records):
            self.read[record.partition() or 0].append(record.offset() or 0)


def consumer_of(group: FakeGroup) -> AsyncRebalanceAwareConsumer:
    """A consumer that reads the log in memory."""
    return AsyncRebalanceAwareConsumer(
        CONFIG, member=group.member(), cluster=group, clock=group.clock
    )


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS)
def test_every_record_is_returned_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, int]]
) -> None:
    group = FakeGroup({"orders": 4})
    fake_log(group, monkeypatch, RECORDS)

    async def play() -> None:
        async with consumer_of(group) as consumer:
            await consumer.subscribe(["orders"])
            tasks = Tasks(consumer)
            await tasks.play(steps)
            await tasks.read_the_rest()
            assert tasks.read == {number: list(range(count)) for number, count in RECORDS.items()}

    asyncio.run(asyncio.wait_for(play(), 20))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FakeGroup:
    group = FakeGroup({"orders": 4})
    fake_log(group, monkeypatch, RECORDS)
    return group


async def cancelled_when_its_records_are_there(
    consumer: AsyncRebalanceAwareConsumer,
) -> asyncio.Task[list[Message]]:
    """A task that is cancelled while the records of its poll wait for it."""
    polling = asyncio.create_task(consumer.poll(1.0, 5))
    await asyncio.sleep(0)
    consumer._owner.submit(lambda: None, nested=False).result(120)
    polling.cancel()
    return polling


@pytest.mark.parametrize("end", ["close", "unsubscribe"])
async def test_records_of_a_cancelled_poll_are_not_committed_at_the_end(
    group: FakeGroup, end: str
) -> None:
    """A shutdown cancels its workers and closes the consumer, whose listener commits."""
    consumer = consumer_of(group)
    consumer.set_rebalance_listener(CommitOnRevoke())
    await consumer.subscribe(["orders"])
    seen = await consumer.poll(0.05, 3)
    polling = await cancelled_when_its_records_are_there(consumer)
    await getattr(consumer, end)()
    with pytest.raises(asyncio.CancelledError):
        await polling
    await consumer.close()
    assert [record.offset() for record in seen] == [0, 1, 2]
    assert group.committed == {P0: OffsetAndMetadata(3, leader_epoch=3)}


@pytest.mark.parametrize("offset", [0, 30])
async def test_records_of_a_cancelled_poll_do_not_undo_a_seek(
    group: FakeGroup, offset: int
) -> None:
    async with consumer_of(group) as consumer:
        await consumer.subscribe(["orders"])
        await consumer.poll(0.05, 10)
        polling = await cancelled_when_its_records_are_there(consumer)
        await consumer.seek(P0, offset)
        with pytest.raises(asyncio.CancelledError):
            await polling
        after = [record.offset() for record in await consumer.poll(0.05) if record.partition() == 0]
        assert after == list(range(offset, RECORDS[0]))


async def test_refused_close_in_a_callback_does_not_shorten_later_polls() -> None:
    group = FakeGroup({"orders": 4})

    class Closing(AsyncRebalanceListener):
        async def on_partitions_assigned(self, *_: object) -> None:
            with pytest.raises(IllegalStateError):
                await blue.close()

        async def on_partitions_revoked(self, *_: object) -> None: ...

    blue = AsyncRebalanceAwareConsumer(
        CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )
    blue.set_rebalance_listener(Closing())
    await blue.subscribe(["orders"])
    await blue.poll(0.0)
    before = group.clock()
    await blue.poll(3.0)
    assert group.clock() - before >= 3.0
    await blue.close()
