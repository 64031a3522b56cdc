"""A member that waits in its callback: a contender of `deploy_duplicates`, run as a program.

It works in a thread, so that it can poll. When partitions are asked for, its callback waits for
the batch at work and commits it, which is the most that a callback can do.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from confluent_kafka import Consumer, KafkaException, TopicPartition

from proofs.bench.deploy_work import BLOCKING, Range, Work


class Member:
    """A member of the group that works on one batch at a time."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._pool = ThreadPoolExecutor(1)
        self._at_work: tuple[Future[None], list[TopicPartition]] | None = None
        self._batches = 0
        config = {
            **work.client_config(f"{work.topic}-{BLOCKING}"),
            "partition.assignment.strategy": "cooperative-sticky",
        }
        self._consumer = Consumer(config)
        self._stop = threading.Event()

    def run(self) -> None:
        """Work until it is asked to end."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        self._consumer.subscribe([self._work.topic], on_revoke=self._on_revoke)
        while not self._stop.is_set():
            if self._at_work is not None:
                self._stay()
            else:
                self._begin()
        self._finish()
        self._consumer.close()

    def _stay(self) -> None:
        """Poll to stay a member. All is paused, but for what was assigned meanwhile."""
        message = self._consumer.poll(0.1)
        if message is not None and message.error() is None:
            self._consumer.seek(
                TopicPartition(
                    str(message.topic()), int(message.partition() or 0), int(message.offset() or 0)
                )
            )
        if self._at_work is not None and self._at_work[0].done():
            self._finish()

    def _begin(self) -> None:
        ranges: dict[int, list[int]] = {}
        for message in self._consumer.consume(1000, 0.5):
            if message.error() is None:
                offset = int(message.offset() or 0)
                ranges.setdefault(int(message.partition() or 0), [offset, offset])[1] = offset + 1
        if not ranges:
            return
        self._batches += 1
        batch: list[Range] = [(number, one[0], one[1]) for number, one in ranges.items()]
        name = f"{os.getpid()}-{self._batches}"
        work = self._pool.submit(self._do, name, batch)
        ends = [TopicPartition(self._work.topic, number, until) for number, _, until in batch]
        self._at_work = (work, ends)
        self._consumer.pause(self._consumer.assignment())

    def _do(self, name: str, batch: list[Range]) -> None:
        self._work.wait()
        self._work.write(BLOCKING, name, batch)

    def _finish(self) -> None:
        if self._at_work is None:
            return
        work, ends = self._at_work
        self._at_work = None
        work.result()
        with suppress(KafkaException):  # it is no owner any more: another member does this again
            self._consumer.commit(offsets=ends, asynchronous=False)
        self._consumer.resume(self._consumer.assignment())

    def _on_revoke(self, _consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        self._finish()


if __name__ == "__main__":
    Member(Work.from_environment()).run()
