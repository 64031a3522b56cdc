"""One transaction commits the copied records and their offsets: exactly once, topic to topic.

A transaction spans several polls. When Kafka asks for a partition in the middle of one, the revoke
is delayed until the transaction is committed, so nothing is aborted and done again. The partitions
that stay are read all the while.

    python examples/transactions.py localhost:9092 orders copies
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import uuid
from typing import Any

import confluent_kafka

from dagster_rebalance import RebalanceAwareConsumer, TopicPartition
from dagster_rebalance.core.model.offsets import next_offset

TRANSACTION_S = 0.5


class Copies:
    """Writes records to a topic, with the offsets that they were read at."""

    def __init__(self, brokers: str, topic: str) -> None:
        self._topic = topic
        config = {
            "bootstrap.servers": brokers,
            "transactional.id": f"copies-{uuid.uuid4()}",
            "transaction.timeout.ms": 10_000,
        }
        self._producer = confluent_kafka.Producer(config)
        self._producer.init_transactions(30)
        self._first: dict[TopicPartition, int] = {}
        self._next: dict[TopicPartition, int] = {}
        self._opened_at = 0.0

    @property
    def open(self) -> frozenset[TopicPartition]:
        """The partitions with records in the transaction that is open."""
        return frozenset(self._next)

    @property
    def is_due(self) -> bool:
        """Whether the transaction has lasted long enough."""
        return bool(self._next) and time.monotonic() >= self._opened_at + TRANSACTION_S

    def add(self, record: confluent_kafka.Message) -> None:
        """Write a record; the first one opens a transaction."""
        if not self._next:
            self._producer.begin_transaction()
            self._opened_at = time.monotonic()
        partition, offset = partition_of(record), record.offset() or 0
        self._producer.produce(self._topic, f"{partition.topic} {partition.partition} {offset}")
        self._first.setdefault(partition, offset)
        self._next[partition] = next_offset(offset)

    def commit(self, consumer: RebalanceAwareConsumer) -> None:
        """End the transaction, with the offsets in it."""
        if not self._next:
            return
        offsets = [
            confluent_kafka.TopicPartition(tp.topic, tp.partition, at)
            for tp, at in self._next.items()
        ]
        member: Any = consumer.group_metadata().client
        try:
            self._producer.send_offsets_to_transaction(offsets, member, 30)
            self._producer.commit_transaction(30)
        except confluent_kafka.KafkaException as problem:
            # A rebalance that has ended meanwhile makes what the client knows of its membership too
            # old for the broker.
            if not problem.args[0].txn_requires_abort():
                raise
            self.abort(consumer, frozenset())
            return
        print(f"{len(offsets)} partitions", flush=True)
        self._first.clear()
        self._next.clear()

    def abort(
        self, consumer: RebalanceAwareConsumer, lost: frozenset[TopicPartition]
    ) -> frozenset[TopicPartition]:
        """Abort the transaction, and return the partitions to read again.

        These are the partitions that this member keeps; other members read the rest. A lost
        partition that was assigned again starts where its former owner ended.
        """
        self._producer.abort_transaction(30)
        kept = consumer.assignment() - consumer.get_to_be_revoked_partitions() - lost
        again = self.open & kept
        for partition in again:
            consumer.seek(partition, self._first[partition])
        self._first.clear()
        self._next.clear()
        return again


def partition_of(record: confluent_kafka.Message) -> TopicPartition:
    """Where a record comes from."""
    return TopicPartition(record.topic() or "", record.partition() or 0)


def main(brokers: str, topic: str, output: str, group: str = "copies") -> None:
    """Copy until Ctrl-C."""
    # An exception out of the middle of a commit would leave it open whether it was made.
    stopping = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stopping.set())
    copies = Copies(brokers, output)
    with RebalanceAwareConsumer(
        {"bootstrap.servers": brokers, "group.id": group, "auto.offset.reset": "earliest"}
    ) as consumer:
        consumer.subscribe([topic])
        while not stopping.is_set():
            records = consumer.poll(0.1)
            lost = consumer.get_lost_partitions()
            again = copies.abort(consumer, lost) if lost & copies.open else frozenset()
            for record in records:
                if partition_of(record) not in again:
                    copies.add(record)
            if copies.is_due:
                copies.commit(consumer)
            consumer.delay_revoke(copies.open)
        copies.commit(consumer)


if __name__ == "__main__":
    main(*sys.argv[1:])
