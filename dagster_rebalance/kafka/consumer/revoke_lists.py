"""The lists of KIP-983: partitions to revoke in the next poll, in the poll thereafter, and lost.

Every partition is on at most one list. The client completes a revoke request as a whole (in
librdkafka the first unassign ends it for all of its partitions), so completion has two levels: a
partition that was not delayed is *completed*, and has left the API's assignment. It is *released*
to Kafka with the other partitions of its request, when the last of them has left the lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.model.offsets import TopicPartition


@dataclass(frozen=True, slots=True)
class DueRevokes:
    """Revokes to carry out at the start of a poll.

    Attributes:
        completed: The completed partitions, of this poll and earlier ones, that are not released.
        release: The partitions to release to Kafka now, in one request. Each poll returns them
            until `released` is called.
        has_undelivered: Whether the caller did not receive the result of the previous poll, and
            must receive it without delay.
    """

    completed: frozenset[TopicPartition]
    release: frozenset[TopicPartition]
    has_undelivered: bool = False


class RevokeLists:
    """Partitions that are lost, or revoked in the next poll (revoke-next) or the one thereafter."""

    def __init__(self) -> None:
        self._next: set[TopicPartition] = set()
        self._thereafter: set[TopicPartition] = set()
        self.lost: frozenset[TopicPartition] = frozenset()
        """The partitions that were lost during the last poll."""
        self._assigned: set[TopicPartition] = set()
        self._unreleased: set[TopicPartition] = set()
        self._is_undelivered = False

    @property
    def to_be_revoked(self) -> frozenset[TopicPartition]:
        """The partitions that will be revoked in the next poll, unless they are delayed."""
        return frozenset(self._next)

    @property
    def delayed(self) -> frozenset[TopicPartition]:
        """The partitions that will be revoked in the poll thereafter."""
        return frozenset(self._thereafter)

    @property
    def unreleased(self) -> frozenset[TopicPartition]:
        """The partitions of revoke requests that are not released to Kafka, completed ones too."""
        return frozenset(self._unreleased)

    def start_poll(self) -> DueRevokes:
        """Complete the revoke-next list, clear the lost list, and make delayed partitions next.

        If the caller did not receive the previous poll, its revokes and lost partitions stay.
        """
        if not self._is_undelivered:
            self.lost = frozenset()
            return self.complete()
        self._is_undelivered = False
        self.delay(self._next)
        due = self.complete()
        return DueRevokes(due.completed, due.release, bool(self._next or self.lost))

    def mark_undelivered(self) -> None:
        """Record that the caller did not receive the result of the last poll."""
        self._is_undelivered = True

    def complete(self) -> DueRevokes:
        """Complete the revoke-next list, and move delayed partitions to it."""
        self._next, self._thereafter = self._thereafter, set()
        unreleased = frozenset(self._unreleased)
        completed = unreleased - self._next
        self._assigned -= completed
        return DueRevokes(completed, frozenset() if self._next else unreleased)

    def released(self) -> None:
        """Record that completed partitions were released, or need no release."""
        self._unreleased -= self._unreleased - self._next - self._thereafter

    def request(self, partitions: Iterable[TopicPartition]) -> None:
        """Put partitions on the revoke-next list.

        librdkafka sends no second request during a hold. A second one would be merged into the
        first: delayed partitions stay delayed, and all are released together.
        """
        requested = set(partitions)
        self._next |= requested - self._thereafter
        self._unreleased |= requested

    def delay(self, partitions: Iterable[TopicPartition]) -> bool:
        """Move partitions from the revoke-next to the revoke-thereafter list; ignore all others.

        Returns:
            Whether all of the partitions are assigned. If not, the assigned ones are still delayed.
        """
        wanted = set(partitions)
        moved = wanted & self._next
        self._next -= moved
        self._thereafter |= moved
        return wanted <= self._assigned

    def lose(self, partitions: Iterable[TopicPartition]) -> None:
        """Move partitions to the lost list; they are never released.

        A completed partition that only waits for its release is not reported as lost.
        """
        named = frozenset(partitions)
        gone = named - (self._unreleased - self._next - self._thereafter)
        self._next -= gone
        self._thereafter -= gone
        self._unreleased -= named
        self.lost |= gone
        self._assigned -= named

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Add partitions to the assignment, so that they can be delayed."""
        self._assigned |= set(partitions)
