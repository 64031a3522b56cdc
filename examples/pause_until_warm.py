"""A new partition stays paused until its cache is warm; warm partitions go on.

This is "pause newly assigned partitions" of KAFKA-20385.

    python examples/pause_until_warm.py localhost:9092 orders
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from dagster_rebalance import RebalanceAwareConsumer, RebalanceListener, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance import RebalanceConsumer


def warm_up(partition: TopicPartition) -> dict[str, str]:
    """Load the data that the work on a partition needs."""
    time.sleep(0.5)
    return {"warmed for": str(partition)}


class WarmFirst(RebalanceListener):
    """Pauses assigned partitions, and returns those to resume."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.caches: dict[TopicPartition, Future[dict[str, str]]] = {}

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """The pause outlives the callback."""
        consumer.pause(partitions)
        self.caches.update(
            {partition: self._pool.submit(warm_up, partition) for partition in partitions}
        )

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Drop the caches; the next owner loads its own."""
        print(f"giving up {len(partitions)} of {len(consumer.assignment())} partitions", flush=True)
        for partition in partitions:
            self.caches.pop(partition).cancel()

    def warm(self) -> set[TopicPartition]:
        """Partitions whose cache is there."""
        return {partition for partition, cache in self.caches.items() if cache.done()}


def main(brokers: str, topic: str, group: str = "pause-until-warm") -> None:
    """Print records of warm partitions until Ctrl-C."""
    config = {"bootstrap.servers": brokers, "group.id": group, "auto.offset.reset": "earliest"}
    # A partition that comes back is paused by the listener again; marks of the last time would only
    # be in the way.
    with (
        ThreadPoolExecutor(4) as pool,
        RebalanceAwareConsumer(config, pause_marks="clear") as consumer,
    ):
        listener = WarmFirst(pool)
        consumer.set_rebalance_listener(listener)
        consumer.subscribe([topic])
        try:
            while True:
                for record in consumer.poll(0.2):
                    cache = listener.caches[
                        TopicPartition(record.topic() or "", record.partition() or 0)
                    ].result(timeout=0)
                    print(record.offset(), cache["warmed for"], flush=True)
                consumer.commit_sync()
                consumer.resume(consumer.paused() & listener.warm())
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
