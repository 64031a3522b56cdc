"""Pause marks that a caller sets, and their transfer to the next owner of a partition.

Marks are independent of the assignment: no rebalance changes them, and they may name partitions,
topics and patterns that are not assigned or do not exist yet.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import BrokerError, PartitionLostError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.kafka.consumer.caller_commits import without_mark
from dagster_rebalance.kafka.group_ports import CommitResult

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Iterable, Mapping

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.consumer.caller_commits import CallerCommits
    from dagster_rebalance.kafka.group_ports import GroupMember

logger = logging.getLogger(__name__)

MARKS_LIMIT_S = 1.0
"""How long a poll waits for Kafka to read or store marks."""
_BACKOFF_S = 5.0
"""For this time after a wait without a response, polls do not wait."""
_SHORTEST_REQUEST_S = 0.5
"""The client closes its connection to the coordinator if a request times out, so no request is sent
with less time."""


class Pauses:
    """Pause marks by partition, by topic and for the whole consumer.

    The fetcher returns no records of a partition that any of the three marks covers. The last call
    that names a topic, by name or by pattern, decides, so a topic can be exempt from a pattern.
    """

    def __init__(self) -> None:
        self.partitions: set[TopicPartition] = set()
        """The partitions with a mark. This set object is never replaced."""
        self._topics: dict[str | re.Pattern[str], bool] = {}
        self.is_everything_paused = False

    def covers(self, partition: TopicPartition) -> bool:
        """Return whether any mark pauses the partition."""
        return (
            self.is_everything_paused
            or partition in self.partitions
            or self._covers_topic(partition.topic)
        )

    def among(self, partitions: Iterable[TopicPartition]) -> frozenset[TopicPartition]:
        """Return the partitions that are paused, of those given."""
        return frozenset(filter(self.covers, partitions))

    def pause_topics(self, topics: Iterable[str | re.Pattern[str]]) -> None:
        """Mark topics by name, or by a pattern that matches the whole name."""
        for topic in topics:
            self._decide(topic, paused=True)

    def resume_topics(self, topics: Iterable[str | re.Pattern[str]]) -> None:
        """Remove the marks of topics; marks of their partitions stay."""
        for topic in topics:
            self._decide(topic, paused=False)

    def _covers_topic(self, topic: str) -> bool:
        for named, paused in reversed(self._topics.items()):
            if named == topic if isinstance(named, str) else named.fullmatch(topic):
                return paused
        return False

    def _decide(self, topic: str | re.Pattern[str], *, paused: bool) -> None:
        self._topics.pop(topic, None)
        if paused or any(self._topics.values()):
            self._topics[topic] = paused
        else:
            self._topics.clear()


class CarriedPauses:
    """Pause marks that move with their partitions, in the metadata of the committed offset.

    A mark is read after an assignment and written before the partition leaves. To write a mark, the
    committed offset is committed again; if there is none, the start position (`position` returns it
    within a timeout). No offset changes. While the coordinator is unavailable, each step of a poll
    waits for at most `MARKS_LIMIT_S`.
    """

    def __init__(
        self,
        member: GroupMember,
        commits: CallerCommits,
        pauses: Pauses,
        position: Callable[[TopicPartition, float], int],
        clock: Callable[[], float],
    ) -> None:
        self._member = member
        self._commits = commits
        self._pauses = pauses
        self._position = position
        self._clock = clock
        self._retry_at = float("-inf")
        self._unread: set[TopicPartition] = set()

    @property
    def unread(self) -> frozenset[TopicPartition]:
        """Partitions whose mark has not been read yet; none of their records may be returned."""
        return frozenset(self._unread)

    @property
    def limit_s(self) -> float:
        """How long a poll may wait for Kafka now: 0 during the back-off."""
        return MARKS_LIMIT_S if self._clock() >= self._retry_at else 0.0

    def expect(self, partitions: Collection[TopicPartition]) -> None:
        """Register newly assigned partitions for the next `read`."""
        self._unread.update(partitions)

    def read(self, limit_s: float) -> None:
        """Apply the stored marks of newly assigned partitions.

        If a mark cannot be read within `limit_s`, it stays unread until the next call.
        """
        committed = self._committed(self._unread, limit_s)
        stored = {
            tp: offset is not None and without_mark(offset.metadata)[1]
            for tp, offset in committed.items()
        }
        self._unread.difference_update(committed)
        self._commits.stored_marks.update(stored)
        self._pauses.partitions.update(tp for tp, is_marked in stored.items() if is_marked)

    def write(self, assigned: Collection[TopicPartition], limit_s: float) -> None:
        """Store the marks that differ, or may differ, from those in Kafka.

        If a mark cannot be stored within `limit_s`, the next call retries.
        """
        deadline = self._clock() + limit_s
        marked, stored = frozenset(self._pauses.partitions), self._commits.stored_marks
        stale = {
            tp for tp in assigned if tp not in self._unread and stored.get(tp) is not (tp in marked)
        }
        if not stale or limit_s <= 0:
            return
        # A commit in flight must not be overwritten with the offset before it.
        if not self._member.settle(limit_s):
            self._back_off()
            return
        answers = self._committed(stale, deadline - self._clock())
        committed = {tp: offset for tp, offset in answers.items() if offset is not None}
        uncommitted = answers.keys() - committed.keys()
        # Without a commit there is no mark to remove.
        stored.update(dict.fromkeys(uncommitted - marked, False))
        refused = self._store(committed, deadline)
        # After the other marks: an unavailable leader may consume the whole timeout.
        refused.update(self._store(self._starts(uncommitted & marked, deadline), deadline))
        error = CommitResult(frozenset(), refused).worst_error()
        if error is not None:
            try:
                raise error
            finally:
                del error, refused  # see `without_frames`

    def forget(self, partitions: Collection[TopicPartition]) -> None:
        """Forget the stored marks of partitions that left the assignment."""
        self._unread.difference_update(partitions)
        for tp in partitions:
            self._commits.stored_marks.pop(tp, None)

    def _committed(
        self, partitions: Collection[TopicPartition], limit_s: float
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        if not partitions or limit_s < _SHORTEST_REQUEST_S:
            return {}
        try:
            return self._member.committed(partitions, limit_s)
        except BrokerError as error:
            if not error.retriable:
                raise
            self._back_off()
            logger.info("pause marks of %d partitions not read yet: %s", len(partitions), error)
            return {}

    def _starts(
        self, partitions: Collection[TopicPartition], deadline: float
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        starts: dict[TopicPartition, OffsetAndMetadata] = {}
        for tp in sorted(partitions):
            left_s = deadline - self._clock()
            if left_s < _SHORTEST_REQUEST_S:
                self._back_off()
                break
            try:
                starts[tp] = OffsetAndMetadata(self._position(tp, left_s))
            except BrokerError as error:
                # Raised here, the error would withhold the records of all partitions. The fetcher
                # raises it for this partition.
                self._back_off()
                logger.info("pause mark of %s not stored yet: %s", tp, error)
        return starts

    def _store(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], deadline: float
    ) -> dict[TopicPartition, BrokerError]:
        """Commit offsets with the current marks; return the errors that are not retriable."""
        left_s = deadline - self._clock()
        if not offsets or left_s <= 0:
            return {}
        marked = frozenset(self._pauses.partitions)
        result = self._commits.commit(
            {
                tp: replace(offset, metadata=without_mark(offset.metadata)[0])
                for tp, offset in offsets.items()
            },
            left_s,
        )
        final = {tp: error for tp, error in result.failed.items() if not error.retriable}
        # A refused mark counts as stored, or each poll would try it again.
        self._commits.stored_marks.update({tp: tp in marked for tp in (*result.committed, *final)})
        for tp in result.failed.keys() - final.keys():
            logger.info("pause mark of %s not stored yet: %s", tp, result.failed[tp])
        if len(result.failed) > len(final):
            self._back_off()
        # The mark of a lost partition is lost with it, and the poll reports the loss.
        return {
            tp: error for tp, error in final.items() if not isinstance(error, PartitionLostError)
        }

    def _back_off(self) -> None:
        self._retry_at = self._clock() + _BACKOFF_S
