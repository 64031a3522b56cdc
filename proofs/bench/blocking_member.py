"""The contender of `deploy_duplicates` that blocks in its rebalance callback, as a program.

A thread works while the main thread polls. The callback waits for the current batch and commits it.
"""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from confluent_kafka import Consumer, KafkaException, TopicPartition

from proofs.bench.deploy_work import BLOCKING, Work, ranges_of


class Member:
    """A member of the group that works on one batch at a time."""

    def __init__(self, work: Work) -> None:
        self._work, self._version = work, work.version.read_text()
        self._pool = ThreadPoolExecutor(1)
        self._at_work: Future[None] | None = None
        self._to_commit: list[TopicPartition] = []
        self._stopped = threading.Event()
        cooperative = {"partition.assignment.strategy": "cooperative-sticky"}
        self._consumer = Consumer({**work.client_config(BLOCKING), **cooperative})

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self._stopped.set())
        self._consumer.subscribe([self._work.topic], on_revoke=lambda *_: self._finish())
        while not self._stopped.is_set():
            if self._at_work is None:
                self._begin()
            elif self._at_work.done():
                self._finish()
            else:
                self._stay()
        self._finish()
        self._consumer.close()

    def _begin(self) -> None:
        ranges = ranges_of(self._consumer.consume(1000, 0.5))
        if ranges:
            self._to_commit = [
                TopicPartition(self._work.topic, partition, until) for partition, _, until in ranges
            ]
            self._consumer.pause(self._consumer.assignment())
            self._at_work = self._pool.submit(self._work.process, ranges, self._version)

    def _stay(self) -> None:
        """Poll to remain a member; records of new partitions have to wait."""
        message = self._consumer.poll(0.1)
        if message is not None and message.error() is None:
            number, offset = int(message.partition() or 0), int(message.offset() or 0)
            waiting = TopicPartition(self._work.topic, number, offset)
            self._consumer.seek(waiting)
            self._consumer.pause([waiting])

    def _finish(self) -> None:
        if self._at_work is None:
            return
        self._at_work.result()
        self._at_work = None
        with suppress(KafkaException):  # it is no owner any more: another member does this again
            self._consumer.commit(offsets=self._to_commit, asynchronous=False)
        self._consumer.resume(self._consumer.assignment())


if __name__ == "__main__":
    Member(Work.from_environment()).run()
