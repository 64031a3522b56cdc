"""Pause marks travel with their partitions, in the metadata of the committed offset.

This module reads a mark on assignment, and writes it before the partition goes.

Owns when a mark is read and written. To write a mark, it commits the offset that is committed
already or, where none is, the position at which reading starts. Must never read a record or change
an offset on the way.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_rebalance.consumer.caller_commits import worst_error
from dagster_rebalance.consumer.events import CommitResult
from dagster_rebalance.consumer.pausing import with_mark, without_mark
from dagster_rebalance.core.errors import BrokerError
from dagster_rebalance.core.partition import OffsetAndMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dagster_rebalance.consumer.pausing import PauseMarks
    from dagster_rebalance.consumer.port import GroupMember
    from dagster_rebalance.core.partition import TopicPartition

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


class CarriedMarks:
    """The marks of one consumer's partitions, as Kafka stores them.

    Args:
        member: The member of the group.
        marks: What the user has paused.
        position: Where reading of a partition stands.
    """

    def __init__(
        self, member: GroupMember, marks: PauseMarks, position: Callable[[TopicPartition], int]
    ) -> None:
        self._member = member
        self._marks = marks
        self._position = position
        self._stored: set[TopicPartition] = set()
        self._unread: set[TopicPartition] = set()

    @property
    def unread(self) -> frozenset[TopicPartition]:
        """Partitions whose mark is not known yet: nothing may be read of them."""
        return frozenset(self._unread)

    def expect(self, partitions: Collection[TopicPartition]) -> None:
        """Partitions were assigned: `read` them."""
        self._unread.update(partitions)

    def read(self) -> None:
        """Take over the marks that came with the partitions.

        A mark without an answer stays unread until the next call.

        Raises:
            BrokerError: Trying again is of no use.
        """
        found = self._committed(self._unread)
        marked = {tp for tp, offset in found.items() if offset and without_mark(offset.metadata)[1]}
        self._unread.difference_update(found)
        self._stored |= marked
        self._marks.pause(marked)

    def write(self, assigned: Collection[TopicPartition]) -> None:
        """Store the marks that have changed since they were read or written.

        The next call tries a mark again that the broker cannot take now.

        Raises:
            BrokerError: A mark cannot be stored, and trying again is of no use.
        """
        marked = self._marks.partitions
        stale = {
            tp
            for tp in assigned
            if tp not in self._unread and (tp in marked) != (tp in self._stored)
        }
        # An offset that is still on its way must not be overwritten with the one before it.
        if not stale or not self._member.settle(_TIMEOUT_S):
            return
        found = self._committed(stale)
        wanted = {
            tp: _marked(offset or OffsetAndMetadata(self._position(tp)), is_marked=tp in marked)
            for tp, offset in found.items()
        }
        result = self._member.commit(wanted)
        final = {tp: error for tp, error in result.failed.items() if not error.retriable}
        self._stored.symmetric_difference_update({*result.committed, *final})
        for tp in result.failed.keys() - final.keys():
            logger.info("the pause mark of %s is not stored yet: %s", tp, result.failed[tp])
        error = worst_error(CommitResult(frozenset(), final))
        if error is not None:
            raise error

    def leave(self, partitions: Collection[TopicPartition]) -> None:
        """Partitions are not assigned any more; their marks went with them."""
        self._unread.difference_update(partitions)
        self._stored.difference_update(partitions)

    def _committed(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        if not partitions:
            return {}
        try:
            return self._member.committed(partitions, _TIMEOUT_S)
        except BrokerError as problem:
            if not problem.retriable:
                raise
            logger.info(
                "the pause marks of %d partitions are not known yet: %s", len(partitions), problem
            )
            return {}


def _marked(committed: OffsetAndMetadata, *, is_marked: bool) -> OffsetAndMetadata:
    text, _ = without_mark(committed.metadata)
    return replace(committed, metadata=with_mark(text) if is_marked else text)
