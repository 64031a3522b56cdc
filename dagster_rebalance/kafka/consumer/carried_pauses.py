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

from dagster_rebalance.core.model.errors import BrokerError, PartitionLostError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.kafka.consumer.commits import worst_error
from dagster_rebalance.kafka.consumer.pauses import without_mark
from dagster_rebalance.kafka.events import CommitResult

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.consumer.commits import CallerCommits
    from dagster_rebalance.kafka.consumer.pauses import Pauses
    from dagster_rebalance.kafka.ports import GroupMember

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""How long a poll waits for Kafka."""
_PAUSE_S = 5.0
"""How long the polls behind it do not wait, after one has waited in vain."""
_SHORTEST_S = 0.5
"""A question that the client gives up costs it the connection to the coordinator, so none is asked
that may have less time."""


class CarriedPauses:
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
        marks: Pauses,
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
        committed = {tp: offset for tp, offset in found.items() if offset is not None}
        nothing = found.keys() - committed.keys()
        # Without a commit there is no mark to take away.
        stored.update(dict.fromkeys(nothing - marked, False))
        refused = self._store(committed, deadline)
        # Behind the others: a leader that is away may take all of the time.
        starts = self._starts(nothing & marked, deadline)
        refused.update(self._store(starts, deadline))
        error = worst_error(CommitResult(frozenset(), refused))
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

    def _starts(
        self, partitions: Collection[TopicPartition], deadline: float
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Where reading begins, as far as it can be looked up."""
        found: dict[TopicPartition, OffsetAndMetadata] = {}
        for tp in sorted(partitions):
            left_s = deadline - self._clock()
            if left_s < _SHORTEST_S:
                self._not_answered()
                break
            try:
                found[tp] = OffsetAndMetadata(self._position(tp, left_s))
            except BrokerError as problem:
                # Raised, it would keep all records back. Who reads the partition tells it.
                self._not_answered()
                logger.info("the pause mark of %s is not stored yet: %s", tp, problem)
        return found

    def _store(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], deadline: float
    ) -> dict[TopicPartition, BrokerError]:
        """Commit offsets with the marks of now; what is refused for good."""
        left_s = deadline - self._clock()
        if not offsets or left_s <= 0:
            return {}
        marked = self._marks.partitions
        result = self._commits.commit(
            {
                tp: replace(offset, metadata=without_mark(offset.metadata)[0])
                for tp, offset in offsets.items()
            },
            left_s,
        )
        final = {tp: error for tp, error in result.failed.items() if not error.retriable}
        # One that is refused for good counts as stored: each poll would try it again.
        self._commits.stored_marks.update({tp: tp in marked for tp in (*result.committed, *final)})
        for tp in result.failed.keys() - final.keys():
            logger.info("the pause mark of %s is not stored yet: %s", tp, result.failed[tp])
        if len(result.failed) > len(final):
            self._not_answered()
        # The mark of a lost partition goes with it, and the poll tells the loss.
        return {
            tp: error for tp, error in final.items() if not isinstance(error, PartitionLostError)
        }

    def _not_answered(self) -> None:
        self._again_at = self._clock() + _PAUSE_S
