"""The poll loop of KIP-983 gives a partition up once the partition's own records are done.

Threads work on the records. Run the program twice, and end one of them with Ctrl-C: the other one
takes over, and no record is worked on twice.

    python examples/kip983_loop.py localhost:9092 orders
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dagster_rebalance import OffsetTracker, RebalanceAwareConsumer

if TYPE_CHECKING:
    from confluent_kafka import Message


def work_on(record: Message) -> None:
    """Simulate slow work."""
    time.sleep(0.01)
    print(
        f"{record.topic()} {record.partition()} {record.offset()}\n", end="", flush=True
    )  # one write: other threads print too


def main(brokers: str, topic: str, group: str = "kip983-loop") -> None:
    """Work on records until Ctrl-C, then finish the begun ones."""
    config = {"bootstrap.servers": brokers, "group.id": group, "auto.offset.reset": "earliest"}
    tracker = OffsetTracker()
    stopping = threading.Event()

    def work(record: Message) -> None:
        work_on(record)
        tracker.done_record(record)

    with ThreadPoolExecutor(8) as pool, RebalanceAwareConsumer(config) as consumer:

        def stop(*_: object) -> None:
            stopping.set()
            consumer.wakeup()

        # An exception could come between a poll and what the loop does with its result.
        signal.signal(signal.SIGINT, stop)
        consumer.subscribe([topic])
        while not stopping.is_set():
            records = consumer.poll(1.0)
            # What was lost may be back with the same poll, behind what another owner has done.
            gone = tracker.partitions - consumer.assignment()
            tracker.forget(consumer.get_lost_partitions() | gone)
            tracker.track(records)
            for record in records:
                pool.submit(work, record)
            tracker.commit(consumer)
            consumer.delay_revoke(tracker.unfinished(consumer.get_to_be_revoked_partitions()))
        pool.shutdown()
        tracker.commit(consumer)


if __name__ == "__main__":
    main(*sys.argv[1:])
