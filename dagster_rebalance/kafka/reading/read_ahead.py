"""Records that an iteration has read ahead of its caller.

They count as read only when the caller has taken them. Must never decide whether the caller may
take one: the fetcher drops those of partitions that are paused, sought or gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.kafka.client.confluent import partition_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from confluent_kafka import Message

    from dagster_rebalance.core.model.offsets import TopicPartition


class ReadAhead:
    """The records of one read, in their order, and how many of them the caller has taken.

    The consumer takes a record in plain steps, without a call, because a signal handler may raise
    in each call. So the attributes are public.
    """

    def __init__(self) -> None:
        self.records: list[Message] = []
        self.taken = 0
        self.is_checked = True
        """Whether no partition of these records was withheld since they were read."""
        self._last_taken: tuple[int, dict[TopicPartition, Message | None]] | None = None

    @property
    def left(self) -> list[Message]:
        """The records that the caller has not taken."""
        return self.records[self.taken :]

    def take(self, count: int) -> list[Message]:
        """Take the next records."""
        records = self.records[self.taken : self.taken + count]
        self.taken += len(records)
        return records

    def keep(self, records: list[Message], taken: int = 0) -> None:
        """Replace the records."""
        self._last_taken = None
        self.records, self.taken = records, taken

    def drop(self, partitions: Collection[TopicPartition]) -> None:
        """Remove the records of partitions."""
        if self.records:
            taken, left = (
                [record for record in records if partition_of(record) not in partitions]
                for records in (self.records[: self.taken], self.left)
            )
            self.keep(taken + left, len(taken))

    def last_taken(self) -> dict[TopicPartition, Message | None]:
        """Return the last taken record of each partition with records that are not taken."""
        if self._last_taken is None or self._last_taken[0] != self.taken:
            taken = {partition_of(record): record for record in self.records[: self.taken]}
            found = {tp: taken.get(tp) for tp in map(partition_of, self.left)}
            self._last_taken = (self.taken, found)
        return self._last_taken[1]
