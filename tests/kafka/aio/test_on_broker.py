"""The asyncio consumer on a real broker: cancelled polls, and two members in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.kafka.aio.async_consumer import AsyncRebalanceAwareConsumer

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import TopicPartition
    from tests.kafka.readers import Readers

pytestmark = [
    pytest.mark.broker,
    pytest.mark.parametrize("group", ["consumer", "classic"], indirect=True),
]


EACH = 3000


async def test_cancelled_polls_lose_no_record(group: Readers) -> None:
    group.produce(500)
    read: dict[int, list[int]] = {number: [] for number in range(4)}
    cancelled = 0
    async with AsyncRebalanceAwareConsumer(group.config) as consumer:
        await consumer.subscribe([group.topic])
        while sum(map(len, read.values())) < 2000:
            # Polls are cancelled before, while and after the client returns records. One in twenty
            # is not, for progress on a slow machine.
            patience_s = 0.0005 * (cancelled % 40) if cancelled % 20 else 5.0
            cancelled += 1
            with contextlib.suppress(asyncio.TimeoutError):
                for record in await asyncio.wait_for(
                    consumer.poll(5.0, max_records=20), patience_s
                ):
                    read[record.partition() or 0].append(record.offset() or 0)
    assert cancelled > 40
    assert all(offsets == list(range(500)) for offsets in read.values())


async def test_cancelled_polls_of_several_tasks_lose_no_record(group: Readers) -> None:
    group.produce(600)
    read: dict[int, list[int]] = {number: [] for number in range(4)}
    async with AsyncRebalanceAwareConsumer(group.config) as consumer:
        await consumer.subscribe([group.topic])

        async def read_with_little_patience() -> None:
            polls = 0
            while sum(map(len, read.values())) < 2400:
                # One in three is not cancelled, for progress on a slow machine.
                patience_s = 5.0 if polls % 3 == 0 else 0.005 * (polls % 12)
                polls += 1
                with contextlib.suppress(asyncio.TimeoutError):
                    for record in await asyncio.wait_for(
                        consumer.poll(5.0, max_records=25), patience_s
                    ):
                        read[record.partition() or 0].append(record.offset() or 0)

        async def keep_the_loop_busy() -> None:
            while sum(map(len, read.values())) < 2400:
                sum(range(300_000))
                await asyncio.sleep(0)

        await asyncio.gather(keep_the_loop_busy(), *(read_with_little_patience() for _ in range(3)))
    assert all(offsets == list(range(600)) for offsets in read.values())


async def test_hold_and_release_in_one_event_loop(group: Readers) -> None:
    released: set[TopicPartition] = set()

    async def hold_for_a_while(consumer: AsyncRebalanceAwareConsumer) -> None:
        work: asyncio.Task[None] | None = None
        while len(await consumer.assignment()) != 2 or not released:
            result = await consumer.poll_with_rebalance(0.2)
            if result.to_be_revoked:
                work = work or asyncio.create_task(asyncio.sleep(1.0))
                if work.done():
                    released.update(result.to_be_revoked)
                else:
                    assert await consumer.delay_revoke(result.to_be_revoked)

    async def wait_for_a_share(consumer: AsyncRebalanceAwareConsumer) -> None:
        while len(await consumer.assignment()) != 2:
            await consumer.poll(0.2)
            if not released:
                assert not await consumer.assignment()

    async with (
        AsyncRebalanceAwareConsumer(group.config) as blue,
        AsyncRebalanceAwareConsumer(group.config) as green,
    ):
        await blue.subscribe([group.topic])
        while len(await blue.assignment()) != 4:
            await blue.poll(0.2)
        await green.subscribe([group.topic])
        await asyncio.gather(hold_for_a_while(blue), wait_for_a_share(green))
        assert await green.assignment() == released


async def test_asyncio_iteration_returns_each_record_once(group: Readers) -> None:
    group.produce(EACH)
    read: dict[int, list[int]] = {number: [] for number in range(4)}
    async with AsyncRebalanceAwareConsumer(group.config) as consumer:
        await consumer.subscribe([group.topic])
        async for message in consumer:
            read[message.partition() or 0].append(message.offset() or 0)
            count = sum(map(len, read.values()))
            if count % 1000 == 0:
                await consumer.commit_sync()
            if count == 4 * EACH:
                break
        await consumer.commit_sync()
        committed = await consumer.committed(await consumer.assignment())
    assert all(offsets == list(range(EACH)) for offsets in read.values())
    assert [at and at.offset for at in committed.values()] == [EACH] * 4
