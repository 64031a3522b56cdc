"""Offsets stored with the results give exactly once without Kafka's commits.

This is "seek to external offsets" of KAFKA-20385. The sums and the offsets they reach to are in one
SQLite file, written in one transaction. On assignment the consumer seeks to the offsets of the
file; the offsets committed in Kafka have no meaning here.

    python examples/seek_to_external_offsets.py localhost:9092 orders sums.db
"""

from __future__ import annotations

import sqlite3
import sys
from typing import TYPE_CHECKING

from dagster_rebalance import RebalanceAwareConsumer, RebalanceListener

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance import RebalanceConsumer, TopicPartition


class Sums:
    """How many bytes were read of each partition, up to which offset."""

    def __init__(self, path: str) -> None:
        self._database = sqlite3.connect(path)
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS sums (topic TEXT, partition INT, next_offset INT, bytes "
            "INT, PRIMARY KEY (topic, partition))"
        )

    def next_offset(self, partition: TopicPartition) -> int:
        """Where to read on."""
        key = (partition.topic, partition.partition)
        found = self._database.execute(
            "SELECT next_offset FROM sums WHERE topic = ? AND partition = ?", key
        ).fetchone()
        return int(found[0]) if found else 0

    def add(self, topic: str, partition: int, offset: int, size: int) -> None:
        """Count a record, together with the offset."""
        self._database.execute(
            "INSERT INTO sums VALUES (?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET next_offset = excluded.next_offset, bytes = bytes + "
            "excluded.bytes",
            (topic, partition, offset + 1, size),
        )

    def save(self) -> None:
        """End the transaction."""
        self._database.commit()


class SeekToSums(RebalanceListener):
    """Sends the consumer where the sums end."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Holds before the first record."""
        for partition in partitions:
            consumer.seek(partition, self._sums.next_offset(partition))

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Everything that was read is saved already."""


def main(brokers: str, topic: str, path: str, group: str = "sums") -> None:
    """Sum until Ctrl-C."""
    sums = Sums(path)
    with RebalanceAwareConsumer(
        {"bootstrap.servers": brokers, "group.id": group, "auto.offset.reset": "earliest"}
    ) as consumer:
        consumer.set_rebalance_listener(SeekToSums(sums))
        consumer.subscribe([topic])
        try:
            while True:
                records = consumer.poll(1.0)
                for record in records:
                    sums.add(
                        record.topic() or "",
                        record.partition() or 0,
                        record.offset() or 0,
                        len(record.value() or b""),
                    )
                sums.save()
                if records:
                    print(f"{len(records)} records", flush=True)
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
