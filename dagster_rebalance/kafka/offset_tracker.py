"""Offsets that may be committed when records are finished out of order.

An offset may be committed when every tracked record before it is finished; offsets without a record
(transactions, compaction) are skipped. The tracker keeps no state of records before that offset.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol

from dagster_rebalance.core.model.errors import PartitionLostError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition, next_offset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dagster_rebalance.core.model.errors import BrokerError
    from dagster_rebalance.kafka.group_ports import CommitResult, Offsets


class _Record(Protocol):
    """A record, such as a `confluent_kafka.Message`; an event of the client has an error."""

    def topic(self) -> str | None: ...

    def partition(self) -> int | None: ...

    def offset(self) -> int | None: ...

    def error(self) -> object | None: ...


class _Committer(Protocol):
    """The method of `RebalanceAwareConsumer` that the tracker calls."""

    def commit_offsets(self, offsets: Offsets) -> CommitResult: ...


@dataclass(slots=True)
class _Progress:
    """Progress of one partition in one ownership.

    Attributes:
        committed: The last committed offset; at first the offset of the first record.
        until: The offset after the last record.
        unfinished: The offsets of unfinished records.
        heap: A heap of these offsets, with finished ones until they reach its top.
    """

    partition: TopicPartition
    committed: int
    until: int
    unfinished: set[int] = field(default_factory=set)
    heap: list[int] = field(default_factory=list)

    @property
    def next_offset(self) -> int:
        """The offset to commit: that of the first unfinished record."""
        while self.heap and self.heap[0] not in self.unfinished:
            heappop(self.heap)
        return self.heap[0] if self.heap else self.until

    @property
    def is_committable(self) -> bool:
        return self.next_offset > self.committed

    def track(self, offset: int) -> None:
        if offset not in self.unfinished:
            self.unfinished.add(offset)
            heappush(self.heap, offset)
        self.until = max(self.until, next_offset(offset))

    def note_committed(self, offset: int) -> None:
        self.committed = max(self.committed, offset)


class OffsetTracker:
    """Tracks records from the poll that returned them to the commit that covers them.

    Any thread may call any method. Call `commit` in the thread that polls, because a consumer is
    used from one thread. Call `forget` when a partition was revoked or lost, and when you seek back
    to commit its records again.

    Example:
        ```python
        tracker = OffsetTracker()
        while True:
            records = consumer.poll(1.0)
            gone = tracker.partitions - consumer.assignment()
            tracker.forget(consumer.get_lost_partitions() | gone)
            tracker.track(records)
            # In any threads and any order: each calls tracker.done_record(record) at its end.
            work.start(records)
            tracker.commit(consumer)
            consumer.delay_revoke(tracker.unfinished(consumer.get_to_be_revoked_partitions()))
        ```
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Held during a request, so no commit overtakes an earlier one. Finished records need only
        # the other lock, and never wait for the broker.
        self._committing = threading.RLock()
        # By topic, then by number: two lookups cost a third of the hash of a TopicPartition.
        self._topics: dict[str, dict[int, _Progress]] = {}

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """The tracked partitions."""
        with self._lock:
            return frozenset(progress.partition for progress in self._all())

    def track(self, records: Iterable[_Record]) -> None:
        """Add polled records, before the work on them starts.

        Messages with an error are not records and are ignored. A record that is polled again is
        unfinished again; committed offsets stay committed.
        """
        with self._lock:
            for record in records:
                if record.error() is None:
                    self._track(record.topic() or "", record.partition() or 0, record.offset() or 0)

    def done(self, partition: TopicPartition, offset: int) -> None:
        """Mark a record as finished.

        Records that are not tracked are ignored. A late call from an earlier ownership of the
        partition counts if the record is tracked again: it was processed.
        """
        with self._lock:
            try:
                progress = self._topics[partition.topic][partition.partition]
            except KeyError:
                return
            progress.unfinished.discard(offset)

    def done_record(self, record: _Record) -> None:
        """Mark a record as finished, as `done` does."""
        if record.error() is None:
            self.done(
                TopicPartition(record.topic() or "", record.partition() or 0), record.offset() or 0
            )

    def to_commit(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the next offset of each partition with progress since its last commit."""
        with self._lock:
            return _offsets(progress for progress in self._all() if progress.is_committable)

    def note_committed(self, offsets: Offsets) -> None:
        """Record commits made without `commit`: in a transaction, a callback, or with asyncio."""
        with self._lock:
            for partition, committed in offsets.items():
                progress = self._find(partition)
                if progress is not None:
                    progress.note_committed(committed.offset)

    def commit(self, consumer: _Committer) -> dict[TopicPartition, BrokerError]:
        """Commit the progress of all partitions in one request, if there is any.

        Returns:
            The errors of the failed partitions. The next call tries them again; lost partitions are
            forgotten.
        """
        with self._committing:
            with self._lock:
                due = {
                    progress.partition: progress
                    for progress in self._all()
                    if progress.is_committable
                }
                offsets = _offsets(due.values())
            if not offsets:
                return {}
            result = consumer.commit_offsets(offsets)
            with self._lock:
                for partition in result.committed:
                    due[partition].note_committed(offsets[partition].offset)
                for partition, error in result.failed.items():
                    # Only the ownership of the request is lost: the partition may have been
                    # forgotten and tracked again since.
                    if (
                        isinstance(error, PartitionLostError)
                        and self._find(partition) is due[partition]
                    ):
                        self._forget(partition)
            return dict(result.failed)

    def is_busy(self, partition: TopicPartition) -> bool:
        """Return whether a record of the partition is unfinished, or finished and not committed."""
        return bool(self.unfinished([partition]))

    def unfinished(self, partitions: Iterable[TopicPartition]) -> frozenset[TopicPartition]:
        """Return the partitions that are busy.

        If they were released now, the next owner would repeat their work. A record that is finished
        right after a commit keeps its partition busy until the next commit.
        """
        with self._lock:
            progress_of = [(partition, self._find(partition)) for partition in partitions]
            return frozenset(
                partition
                for partition, progress in progress_of
                if progress and (progress.unfinished or progress.is_committable)
            )

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop revoked or lost partitions; late calls of `done` for them are ignored."""
        with self._lock:
            for partition in partitions:
                self._forget(partition)

    def _all(self) -> Iterator[_Progress]:
        return (progress for numbers in self._topics.values() for progress in numbers.values())

    def _find(self, partition: TopicPartition) -> _Progress | None:
        return self._topics.get(partition.topic, {}).get(partition.partition)

    def _track(self, topic: str, number: int, offset: int) -> None:
        numbers = self._topics.setdefault(topic, {})
        if number not in numbers:
            numbers[number] = _Progress(
                TopicPartition(topic, number), committed=offset, until=offset
            )
        numbers[number].track(offset)

    def _forget(self, partition: TopicPartition) -> None:
        numbers = self._topics.get(partition.topic, {})
        numbers.pop(partition.partition, None)
        if not numbers:
            self._topics.pop(partition.topic, None)


def _offsets(progress: Iterable[_Progress]) -> dict[TopicPartition, OffsetAndMetadata]:
    return {one.partition: OffsetAndMetadata(one.next_offset) for one in progress}
