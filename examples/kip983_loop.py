"""The poll loop of KIP-983 gives a partition up once the partition's own records are done.

Threads work on the records. Run the program twice, and end one of them with Ctrl-C: the other one
takes over, and no record is worked on twice.

    python examples/kip983_loop.py localhost:9092 orders
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dagster_rebalance import OffsetTracker, RebalanceAwareConsumer

if TYPE_CHECKING:
    from confluent_kafka import Message


def work_on(record: Message) -> None:
    """What takes a while."""
    time.sleep(0.01)
    print(
        f"{record.topic()} {record.partition()} {record.offset()}\n", end="", flush=True
    )  # one write: other threads print too


def main(brokers: str, topic: str, group: str = "kip983-loop") -> None:
    """Work on records until Ctrl-C, then finish what was begun."""
    config = {"bootstrap.servers": brokers, "group.id": group, "auto.offset.reset": "earliest"}
    tracker = OffsetTracker()

    def work(record: Message) -> None:
        work_on(record)
        tracker.done_record(record)

    with ThreadPoolExecutor(8) as pool, RebalanceAwareConsumer(config) as consumer:
        consumer.subscribe([topic])
        try:
            while True:
                records = consumer.poll(1.0)
                tracker.forget(
                    tracker.partitions - consumer.assignment()
                )  # what was given up or lost
                tracker.track(records)
                for record in records:
                    pool.submit(work, record)
                tracker.commit(consumer)
                consumer.delay_revoke(tracker.unfinished(consumer.get_to_be_revoked_partitions()))
        except KeyboardInterrupt:
            pool.shutdown()
            tracker.commit(consumer)


if __name__ == "__main__":
    main(*sys.argv[1:])
