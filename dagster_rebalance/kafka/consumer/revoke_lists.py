"""KIP-983 has three lists of partitions: revoke next, revoke thereafter, and lost.

The first two name the partitions to be revoked in the next poll and in the poll thereafter, the
third one those lost in the last poll.

Owns when a requested revoke is completed, and what a delay answers. Every partition is on at most
one list. Must never talk to Kafka: the lists say when to send the release, and the shell sends it.

The client completes one revoke request as a whole (librdkafka: the first unassign ends it for all
of its partitions). So completion has two levels. A partition that was not delayed is *completed*:
gone for the API. Its *release* goes to Kafka together with the others of the same request, when the
last of them has left both lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.core.model.offsets import TopicPartition


@dataclass(frozen=True, slots=True)
class PollStarted:
    """What has to be carried out at the start of a poll.

    Attributes:
        completed: The partitions whose revoke is completed, now or in an earlier poll, and that
            Kafka still counts as ours; they are not in the assignment of the API.
        release: The partitions to be released to Kafka now, in one request. `released` says that
            this was done; until then each poll says it again.
        news: Whether the caller was not told what the poll before has found, and must hear of it at
            once.
    """

    completed: frozenset[TopicPartition]
    release: frozenset[TopicPartition]
    news: bool = False


class RevokeLists:
    """The revoke-next, revoke-thereafter and lost lists of one consumer.

    Example:
        ```python
        lists = RevokeLists()
        lists.assign({orders_0})
        lists.request({orders_0})
        lists.delay({orders_0})  # True: not in the next poll
        lists.start_poll()  # nothing is completed, and orders_0 is on the revoke-next list again
        lists.start_poll()  # orders_0 was not delayed again: completed, and to be released
        lists.released()
        ```
    """

    def __init__(self) -> None:
        self._next: set[TopicPartition] = set()
        self._thereafter: set[TopicPartition] = set()
        self._lost: frozenset[TopicPartition] = frozenset()
        self._assigned: set[TopicPartition] = set()
        self._unreleased: set[TopicPartition] = set()
        self._is_untold = False

    @property
    def to_be_revoked(self) -> frozenset[TopicPartition]:
        """The partitions that will be revoked in the next poll, unless they are delayed."""
        return frozenset(self._next)

    @property
    def delayed(self) -> frozenset[TopicPartition]:
        """The partitions that will be revoked in the poll thereafter."""
        return frozenset(self._thereafter)

    @property
    def lost(self) -> frozenset[TopicPartition]:
        """The partitions that were lost during the last poll."""
        return self._lost

    @property
    def unreleased(self) -> frozenset[TopicPartition]:
        """Return the partitions of revoke requests that are not released to Kafka yet.

        Completed partitions are among them.
        """
        return frozenset(self._unreleased)

    def start_poll(self) -> PollStarted:
        """Complete the revoke-next list, forget the lost partitions, and move the delayed ones up.

        After a poll that told nobody, complete and forget nothing that the caller did not hear of.
        """
        if not self._is_untold:
            self._lost = frozenset()
            return self.complete()
        self._is_untold = False
        self.delay(self._next)
        started = self.complete()
        return PollStarted(started.completed, started.release, news=bool(self._next or self._lost))

    def untold(self) -> None:
        """Note that nobody heard of the findings of the poll that was started last.

        The poll ended with an exception, or its caller is gone.
        """
        self._is_untold = True

    def complete(self) -> PollStarted:
        """Complete what is on the revoke-next list, and move the delayed ones up."""
        self._next, self._thereafter = self._thereafter, set()
        unreleased = frozenset(self._unreleased)
        completed = unreleased - self._next
        self._assigned -= completed
        return PollStarted(completed, frozenset() if self._next else unreleased)

    def released(self) -> None:
        """Kafka was told, or need not be: nothing is held any more."""
        self._unreleased -= self._unreleased - self._next - self._thereafter

    def request(self, partitions: Iterable[TopicPartition]) -> None:
        """A revoke is requested: the partitions go on the revoke-next list.

        librdkafka sends no second request while one is held. Should one come all the same, it joins
        the first: one that is delayed stays delayed, and all are released together.
        """
        requested = set(partitions)
        self._next |= requested - self._thereafter
        self._unreleased |= requested

    def delay(self, partitions: Iterable[TopicPartition]) -> bool:
        """Move partitions from the revoke-next to the revoke-thereafter list.

        Those that are on no list are left as they are. The others are delayed even when it is too
        late for one of the given ones.

        Returns:
            False when some of the partitions are not assigned: lost, given up already, or never
            owned.
        """
        wanted = set(partitions)
        moved = wanted & self._next
        self._next -= moved
        self._thereafter |= moved
        return wanted <= self._assigned

    def lose(self, partitions: Iterable[TopicPartition]) -> None:
        """Partitions are lost: they leave the other lists, and are never released.

        One whose revoke was completed, and that only waits to be released with the others, is no
        loss to anybody: it just ends.
        """
        named = frozenset(partitions)
        gone = named - (self._unreleased - self._next - self._thereafter)
        self._next -= gone
        self._thereafter -= gone
        self._unreleased -= named
        self._lost |= gone
        self._assigned -= named

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Add partitions to the assignment.

        Events of an earlier ownership are no reason to deny a delay.
        """
        self._assigned |= set(partitions)
