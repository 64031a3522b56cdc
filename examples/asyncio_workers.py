"""Asyncio tasks work on records, and a partition is given up once its own tasks are done.

The program needs no lock of its own.

    python examples/asyncio_workers.py localhost:9092 orders
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING

from dagster_rebalance import AsyncRebalanceAwareConsumer, AsyncRebalanceListener, OffsetTracker

if TYPE_CHECKING:
    from collections.abc import Collection

    from confluent_kafka import Message

    from dagster_rebalance import AsyncRebalanceConsumer, TopicPartition


class Announcer(AsyncRebalanceListener):
    """Callbacks may be coroutines, and may call coroutines."""

    async def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        """Say where reading begins."""
        for partition in partitions:
            print(f"assigned {partition} at {await consumer.position(partition)}", flush=True)

    async def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        """Report the revoked partitions."""
        print(
            f"released {', '.join(map(str, partitions))} of {len(await consumer.assignment())}",
            flush=True,
        )


async def work_on(record: Message, tracker: OffsetTracker) -> None:
    """Simulate slow work."""
    await asyncio.sleep(0.01)
    print(record.topic(), record.partition(), record.offset(), flush=True)
    tracker.done_record(record)


async def commit(tracker: OffsetTracker, consumer: AsyncRebalanceAwareConsumer) -> None:
    """Commit the finished records of all partitions in one request.

    A failed commit is repeated after the next poll: in a rebalance the partitions are still
    assigned. That poll reports the lost ones.
    """
    offsets = tracker.to_commit()
    result = await consumer.commit_offsets(offsets)
    tracker.note_committed({partition: offsets[partition] for partition in result.committed})
    for error in result.failed.values():
        print(f"not committed: {error}", file=sys.stderr, flush=True)


async def main(brokers: str, topic: str, group: str = "asyncio-workers") -> None:
    """Work on records until Ctrl-C, then finish the begun ones."""
    config = {"bootstrap.servers": brokers, "group.id": group, "auto.offset.reset": "earliest"}
    tracker = OffsetTracker()
    tasks: set[asyncio.Task[None]] = set()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    async with AsyncRebalanceAwareConsumer(config) as consumer:
        consumer.set_rebalance_listener(Announcer())
        await consumer.subscribe([topic])
        while not stop.is_set():
            result = await consumer.poll_with_rebalance(0.5)
            # What was lost may be back with the same poll, behind what another owner has done.
            gone = tracker.partitions - await consumer.assignment()
            tracker.forget(result.lost | gone)
            tracker.track(result.records)
            for record in result.records:
                task = asyncio.create_task(work_on(record, tracker))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await commit(tracker, consumer)
            await consumer.delay_revoke(tracker.unfinished(result.to_be_revoked))
        await asyncio.gather(*tasks)
        await commit(tracker, consumer)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(*sys.argv[1:]))
