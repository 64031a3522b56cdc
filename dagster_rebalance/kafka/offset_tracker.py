"""Records that are finished out of order, and the offsets that may be committed for them.

Owns what is unfinished of each partition, and keeps nothing of what is finished before it. An
offset may be committed when every tracked record before it is finished; offsets that no record has
(transactions, compaction) are passed over. Must never offer an offset behind an unfinished record,
nor one that is not beyond the last commit.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol

from dagster_rebalance.core.model.errors import PartitionLostError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition, next_offset

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from dagster_rebalance.core.model.errors import BrokerError


class Record(Protocol):
    """What is read of a record: a `confluent_kafka.Message` is one."""

    def topic(self) -> str | None:
        """Its topic."""

    def partition(self) -> int | None:
        """The number of its partition."""

    def offset(self) -> int | None:
        """Its offset."""

    def error(self) -> object | None:
        """Not None when it is no record, but news of the client's: the end of a partition."""


class CommitOutcome(Protocol):
    """What became of a commit (`CommitResult`)."""

    @property
    def committed(self) -> Collection[TopicPartition]:
        """The partitions whose offset is stored."""

    @property
    def failed(self) -> Mapping[TopicPartition, BrokerError]:
        """The others, each with its error."""


class Committer(Protocol):
    """Who commits: a `RebalanceAwareConsumer` does."""

    def commit_offsets(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitOutcome:
        """Commit the offsets of all partitions in one request."""


@dataclass(slots=True)
class _Progress:
    """How far one partition is, in one ownership.

    Attributes:
        partition: The partition.
        committed: The last commit; at first the offset of the first record.
        until: Behind the last record.
        unfinished: The offsets of the records that are not finished.
        order: A heap of them, in which finished ones stay until they come first.
    """

    partition: TopicPartition
    committed: int
    until: int
    unfinished: set[int] = field(default_factory=set)
    order: list[int] = field(default_factory=list)

    @property
    def next_offset(self) -> int:
        """What may be committed: the first unfinished record is the next to be read."""
        while self.order and self.order[0] not in self.unfinished:
            heappop(self.order)
        return self.order[0] if self.order else self.until

    @property
    def has_grown(self) -> bool:
        """Whether there is something new to commit."""
        return self.next_offset > self.committed

    def track(self, offset: int) -> None:
        """A record came."""
        if offset not in self.unfinished:
            self.unfinished.add(offset)
            heappush(self.order, offset)
        self.until = max(self.until, next_offset(offset))

    def note_committed(self, offset: int) -> None:
        """A commit was stored."""
        self.committed = max(self.committed, offset)


class OffsetTracker:
    """Tracks records from the poll that returned them to the commit that covers them.

    Any thread may call any method; call `commit` where you poll, because a consumer has one owner.
    A partition stays tracked until it is forgotten: do that when it was revoked or lost, and when
    you seek back to have its records committed again.

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
        # Held during a request, so that no commit overtakes an earlier one; marks need the other
        # lock alone, and never wait for the broker.
        self._committing = threading.RLock()
        # By topic, then by number: to look both up costs a third of the hash of a TopicPartition.
        self._topics: dict[str, dict[int, _Progress]] = {}

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """What is tracked."""
        with self._lock:
            return frozenset(progress.partition for progress in self._all())

    def track(self, records: Iterable[Record]) -> None:
        """Take in records as they were polled, before the work on them starts.

        What is news of the client's and no record is left out.

        A record that comes once more is unfinished once more; what was committed stays committed.
        """
        with self._lock:
            for record in records:
                if record.error() is None:
                    self._track(record.topic() or "", record.partition() or 0, record.offset() or 0)

    def done(self, partition: TopicPartition, offset: int) -> None:
        """Mark a record as finished.

        A mark for what is not tracked, or not any more, changes nothing. One that comes late, from
        an earlier ownership of the partition, counts if its record was tracked again since: the
        record was processed.
        """
        with self._lock:
            try:
                progress = self._topics[partition.topic][partition.partition]
            except KeyError:
                return
            progress.unfinished.discard(offset)

    def done_record(self, record: Record) -> None:
        """Mark a record as finished, as `done` does."""
        if record.error() is None:
            self.done(
                TopicPartition(record.topic() or "", record.partition() or 0), record.offset() or 0
            )

    def to_commit(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """The next offset of each partition that has grown since its last commit."""
        with self._lock:
            return _offsets(progress for progress in self._all() if progress.has_grown)

    def note_committed(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Note offsets that the caller has committed by other means than `commit`.

        The caller may commit in a transaction, in a rebalance callback, or with asyncio.
        """
        with self._lock:
            for partition, stored in offsets.items():
                progress = self._find(partition)
                if progress is not None:
                    progress.note_committed(stored.offset)

    def commit(self, consumer: Committer) -> dict[TopicPartition, BrokerError]:
        """Commit what has grown, all partitions in one request; there is none when nothing has.

        Returns:
            Why a partition was not committed. It is offered again, unless it was lost: then it is
            forgotten.
        """
        with self._committing:
            with self._lock:
                asked = {
                    progress.partition: progress for progress in self._all() if progress.has_grown
                }
                offsets = _offsets(asked.values())
            if not offsets:
                return {}
            outcome = consumer.commit_offsets(offsets)
            with self._lock:
                for partition in outcome.committed:
                    asked[partition].note_committed(offsets[partition].offset)
                for partition, error in outcome.failed.items():
                    # Meanwhile it may have been forgotten and tracked anew: what is lost is the
                    # ownership that was asked for.
                    if (
                        isinstance(error, PartitionLostError)
                        and self._find(partition) is asked[partition]
                    ):
                        self._forget(partition)
            return dict(outcome.failed)

    def is_busy(self, partition: TopicPartition) -> bool:
        """Whether a record of the partition is unfinished, or finished and not committed."""
        return bool(self.unfinished([partition]))

    def unfinished(self, partitions: Iterable[TopicPartition]) -> frozenset[TopicPartition]:
        """Return those of the partitions that are busy.

        The next owner would have to repeat their work, were they given up now. A record that is
        finished right after a commit keeps its partition busy until the next one, so a release
        never forgets it.
        """
        with self._lock:
            found = [(partition, self._find(partition)) for partition in partitions]
            return frozenset(
                partition
                for partition, progress in found
                if progress and (progress.unfinished or progress.has_grown)
            )

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop partitions that were revoked or lost.

        The tracker offers nothing more for them, and ignores marks that come late.
        """
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
