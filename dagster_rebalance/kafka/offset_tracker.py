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
    from collections.abc import Iterable

    from dagster_rebalance.core.model.errors import BrokerError
    from dagster_rebalance.kafka.group_ports import CommitResult, Offsets


class _Record(Protocol):
    """A record, such as a `confluent_kafka.Message`; a message with an error is no record."""

    def topic(self) -> str | None: ...

    def partition(self) -> int | None: ...

    def offset(self) -> int | None: ...

    def error(self) -> object | None: ...


class _Committer(Protocol):
    """The method of `RebalanceAwareConsumer` that the tracker calls."""

    def commit_offsets(self, offsets: Offsets) -> CommitResult: ...


@dataclass(slots=True)
class _Progress:
    """Progress of one partition since it was assigned.

    Attributes:
        committed: The last committed offset; initially the offset of the first record.
        until: The offset after the last record.
        unfinished: The offsets of unfinished records.
        heap: A heap of these offsets. A finished offset stays until it reaches the top.
    """

    partition: TopicPartition
    committed: int
    until: int
    unfinished: set[int] = field(default_factory=set)
    heap: list[int] = field(default_factory=list)

    @property
    def next_offset(self) -> int:
        """The offset to commit: the offset of the first unfinished record, or else `until`."""
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
        self._progress: dict[TopicPartition, _Progress] = {}

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """The tracked partitions."""
        with self._lock:
            return frozenset(self._progress)

    def track(self, records: Iterable[_Record]) -> None:
        """Add polled records, before the work on them starts.

        Messages with an error are not records and are ignored. A record that is polled again is
        unfinished again; committed offsets stay committed.
        """
        with self._lock:
            for record in records:
                if record.error() is None:
                    at = TopicPartition(record.topic() or "", record.partition() or 0)
                    self._track(at, record.offset() or 0)

    def done(self, partition: TopicPartition, offset: int) -> None:
        """Mark a record as finished.

        Records that are not tracked are ignored. A late call from an earlier assignment of the
        partition counts if the record is tracked again, because the record was processed.
        """
        with self._lock:
            progress = self._progress.get(partition)
            if progress is not None:
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
            return _offsets(one for one in self._progress.values() if one.is_committable)

    def note_committed(self, offsets: Offsets) -> None:
        """Record commits made without `commit`: in a transaction, a callback, or with asyncio."""
        with self._lock:
            for partition, committed in offsets.items():
                progress = self._progress.get(partition)
                if progress is not None:
                    progress.note_committed(committed.offset)

    def commit(self, consumer: _Committer) -> dict[TopicPartition, BrokerError]:
        """Commit the progress of all partitions in one request, if there is any.

        Returns:
            The errors of the failed partitions. The next call commits them again, except for lost
            partitions, which are no longer tracked.
        """
        with self._committing:
            with self._lock:
                due = {
                    partition: progress
                    for partition, progress in self._progress.items()
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
                    # Only the assignment at the time of the request is lost: the partition may have
                    # been forgotten and tracked again since.
                    if (
                        isinstance(error, PartitionLostError)
                        and self._progress.get(partition) is due[partition]
                    ):
                        del self._progress[partition]
            return dict(result.failed)

    def is_busy(self, partition: TopicPartition) -> bool:
        """Return whether a record of the partition is unfinished, or finished and not committed."""
        return bool(self.unfinished([partition]))

    def unfinished(self, partitions: Iterable[TopicPartition]) -> frozenset[TopicPartition]:
        """Return the busy partitions (see `is_busy`).

        If they were released now, the next owner would process records again. A record that is
        finished right after a commit keeps its partition busy until the next commit.
        """
        with self._lock:
            progress_of = [(partition, self._progress.get(partition)) for partition in partitions]
            return frozenset(
                partition
                for partition, progress in progress_of
                if progress and (progress.unfinished or progress.is_committable)
            )

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop revoked or lost partitions; late calls of `done` for them are ignored."""
        with self._lock:
            for partition in partitions:
                self._progress.pop(partition, None)

    def _track(self, partition: TopicPartition, offset: int) -> None:
        progress = self._progress.get(partition)
        if progress is None:
            progress = _Progress(partition, committed=offset, until=offset)
            self._progress[partition] = progress
        progress.track(offset)


def _offsets(progress: Iterable[_Progress]) -> dict[TopicPartition, OffsetAndMetadata]:
    return {one.partition: OffsetAndMetadata(one.next_offset) for one in progress}
