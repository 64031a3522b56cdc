"""Pause marks travel with their partitions, in the metadata of the committed offset.

This module reads a mark on assignment, and writes it before the partition goes.

Owns when a mark is read and written. To write a mark, it commits the offset that is committed
already or, where none is, the position at which reading starts. Must never read a record or change
an offset on the way, nor keep a poll waiting for a coordinator that is away.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.consumer.caller_commits import worst_error
from dagster_rebalance.consumer.events import CommitResult
from dagster_rebalance.consumer.pausing import without_mark
from dagster_rebalance.core.errors import BrokerError
from dagster_rebalance.core.partition import OffsetAndMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dagster_rebalance.consumer.caller_commits import CallerCommits
    from dagster_rebalance.consumer.pausing import PauseMarks
    from dagster_rebalance.consumer.port import GroupMember
    from dagster_rebalance.core.partition import TopicPartition

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""How long a poll waits for Kafka."""
_PAUSE_S = 5.0
"""How long the polls behind it do not wait, after one has waited in vain."""
_SHORTEST_S = 0.5
"""A question that the client gives up costs it the connection to the coordinator, so none is asked
that may have less time."""


class CarriedMarks:
    """The marks of one consumer's partitions, as Kafka stores them.

    Args:
        member: The member of the group.
        commits: Stores offsets, with the marks of their partitions.
        marks: What the user has paused.
        position: Where reading of a partition stands, found within a time-out.
        clock: A monotonic clock.
    """

    def __init__(
        self,
        member: GroupMember,
        commits: CallerCommits,
        marks: PauseMarks,
        position: Callable[[TopicPartition, float], int],
        clock: Callable[[], float],
    ) -> None:
        self._member = member
        self._commits = commits
        self._marks = marks
        self._position = position
        self._clock = clock
        self._again_at = float("-inf")
        self._unread: set[TopicPartition] = set()

    @property
    def unread(self) -> frozenset[TopicPartition]:
        """Partitions whose mark is not known yet: nothing may be read of them."""
        return frozenset(self._unread)

    @property
    def patience_s(self) -> float:
        """How long a poll may wait for Kafka now: not at all, soon after one that did in vain."""
        return PATIENCE_S if self._clock() >= self._again_at else 0.0

    def expect(self, partitions: Collection[TopicPartition]) -> None:
        """Partitions were assigned: `read` them."""
        self._unread.update(partitions)

    def read(self, limit_s: float) -> None:
        """Take over the marks that came with the partitions.

        A mark without an answer within `limit_s` stays unread until the next call.

        Raises:
            BrokerError: Trying again is of no use.
        """
        found = self._committed(self._unread, limit_s)
        stored = {
            tp: offset is not None and without_mark(offset.metadata)[1]
            for tp, offset in found.items()
        }
        self._unread.difference_update(found)
        self._commits.stored_marks.update(stored)
        self._marks.pause(tp for tp, is_marked in stored.items() if is_marked)

    def write(self, assigned: Collection[TopicPartition], limit_s: float) -> None:
        """Store the marks that Kafka does not have, or may not have.

        The next call tries a mark again that the broker cannot take within `limit_s`.

        Raises:
            BrokerError: A mark cannot be stored, and trying again is of no use.
        """
        deadline = self._clock() + limit_s
        marked, stored = self._marks.partitions, self._commits.stored_marks
        stale = {
            tp for tp in assigned if tp not in self._unread and stored.get(tp) is not (tp in marked)
        }
        if not stale or limit_s <= 0:
            return
        # An offset that is still on its way must not be overwritten with the one before it.
        if not self._member.settle(limit_s):
            self._not_answered()
            return
        found = self._committed(stale, deadline - self._clock())
        wanted = {tp: self._unmarked(tp, offset, deadline) for tp, offset in found.items()}
        left_s = deadline - self._clock()
        if not wanted or left_s <= 0:
            return
        result = self._commits.commit(wanted, left_s)
        final = {tp: error for tp, error in result.failed.items() if not error.retriable}
        # One that is refused for good counts as stored: each poll would try it again.
        stored.update({tp: tp in marked for tp in (*result.committed, *final)})
        for tp in result.failed.keys() - final.keys():
            logger.info("the pause mark of %s is not stored yet: %s", tp, result.failed[tp])
        if len(result.failed) > len(final):
            self._not_answered()
        error = worst_error(CommitResult(frozenset(), final))
        if error is not None:
            raise error

    def leave(self, partitions: Collection[TopicPartition]) -> None:
        """Partitions are not assigned any more; their marks went with them."""
        self._unread.difference_update(partitions)
        for tp in partitions:
            self._commits.stored_marks.pop(tp, None)

    def _committed(
        self, partitions: Collection[TopicPartition], limit_s: float
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        if not partitions or limit_s < _SHORTEST_S:
            return {}
        try:
            return self._member.committed(partitions, limit_s)
        except BrokerError as problem:
            if not problem.retriable:
                raise
            self._not_answered()
            logger.info(
                "the pause marks of %d partitions are not known yet: %s", len(partitions), problem
            )
            return {}

    def _unmarked(
        self, partition: TopicPartition, committed: OffsetAndMetadata | None, deadline: float
    ) -> OffsetAndMetadata:
        if committed is None:
            return OffsetAndMetadata(self._position(partition, deadline - self._clock()))
        return replace(committed, metadata=without_mark(committed.metadata)[0])

    def _not_answered(self) -> None:
        self._again_at = self._clock() + _PAUSE_S
