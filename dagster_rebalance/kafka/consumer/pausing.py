"""A caller can pause by partition, by topic, by pattern, and everything.

The policy of the pause marks decides what becomes of a mark when its partition goes.

Owns which partitions the fetcher is silent about: marked ones, ones to be revoked, and ones that
may be marked without our knowing yet. The module keeps the three apart: none of them may undo
another.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.kafka.consumer.arguments import given_names, given_partitions, given_pattern
from dagster_rebalance.kafka.consumer.carried_pauses import CarriedPauses
from dagster_rebalance.kafka.consumer.guard import in_turn
from dagster_rebalance.kafka.consumer.operations import ConsumerOperations
from dagster_rebalance.kafka.consumer.pauses import Pauses

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.client.settings import Settings
    from dagster_rebalance.kafka.consumer.arguments import AnyPartition
    from dagster_rebalance.kafka.ports import ClusterView, GroupMember
    from dagster_rebalance.kafka.reading.fetcher import Fetcher

PauseMarksPolicy: TypeAlias = Literal["keep", "clear", "carry"]
"""What becomes of the pause mark of a partition that goes."""


class PausingConsumer(ConsumerOperations):
    """The operations, with pauses.

    Args:
        member: The member of the group.
        cluster: Answers what is not about the group.
        fetcher: Reads records; None for a consumer that reads none.
        settings: Validated settings.
        pause_marks: What becomes of the mark of a partition that goes.
        clock: A monotonic clock.

    Raises:
        ConfigurationError: There is no such policy.
    """

    def __init__(
        self,
        member: GroupMember,
        cluster: ClusterView,
        fetcher: Fetcher | None,
        settings: Settings,
        pause_marks: PauseMarksPolicy,
        *,
        clock: Callable[[], float],
    ) -> None:
        if pause_marks not in get_args(PauseMarksPolicy):
            msg = f"pause_marks must be 'keep', 'clear' or 'carry', not '{pause_marks}'"
            raise ConfigurationError(msg)
        self._marks = Pauses()
        super().__init__(
            member, cluster, fetcher, settings, self._marks if pause_marks == "carry" else None
        )
        self._keeps_marks = pause_marks == "keep"
        self._revokes_all = settings.is_eager
        self._leaving_marks: set[TopicPartition] = set()
        self._carried = (
            CarriedPauses(member, self._commits, self._marks, self.position, clock)
            if pause_marks == "carry"
            else None
        )
        self._subscription: Collection[str] | re.Pattern[str] = ()
        self._revoking: frozenset[TopicPartition] = frozenset()

    @in_turn
    def pause(self, partitions: Iterable[AnyPartition]) -> None:
        """Return no records of these partitions until `resume`.

        The partitions may be assigned now or later, or not exist yet. The fetcher drops the records
        that it has read ahead, and reads them again after `resume`. `pauses` sets what a
        rebalance does to the marks.
        """
        self._marks.pause(given_partitions("pause", partitions))
        self._withhold()

    @in_turn
    def resume(self, partitions: Iterable[AnyPartition]) -> None:
        """Undo `pause`.

        A partition stays silent while its topic or everything is paused, and once it is to be
        revoked.
        """
        self._marks.resume(given_partitions("resume", partitions))
        self._withhold()

    @in_turn
    def paused(self) -> frozenset[TopicPartition]:
        """Return the partitions named in `pause`, and all assigned partitions that are paused.

        A pause of its topic, or of everything, pauses an assigned partition too.
        """
        return self._marks.partitions | self._marks.among(self._assigned)

    @in_turn
    def pause_topics(self, topics: Iterable[str]) -> None:
        """Return no records of these topics until `resume_topics`.

        The pause covers their future partitions too.

        Raises:
            IllegalStateError: A topic is not subscribed to.
        """
        named = given_names("pause_topics", topics)
        for topic in named:
            if not self._subscribes(topic):
                msg = (
                    f"pause_topics of '{topic}': this consumer does not subscribe to it; "
                    "use pause_pattern for topics that may come"
                )
                raise IllegalStateError(msg)
        self._marks.pause_topics(named)
        self._withhold()

    @in_turn
    def resume_topics(self, topics: Iterable[str]) -> None:
        """Undo `pause_topics`, or take topics out of a paused pattern.

        Partitions that are paused themselves stay so.
        """
        self._marks.resume_topics(given_names("resume_topics", topics))
        self._withhold()

    @in_turn
    def pause_pattern(self, pattern: re.Pattern[str]) -> None:
        """Return no records of topics whose whole name matches, until `resume_pattern`.

        The pause covers topics that are yet to come too.
        """
        self._marks.pause_topics([given_pattern("pause_pattern", pattern)])
        self._withhold()

    @in_turn
    def resume_pattern(self, pattern: re.Pattern[str]) -> None:
        """Undo the pauses of all topics whose whole name matches, by name or by pattern."""
        self._marks.resume_topics([given_pattern("resume_pattern", pattern)])
        self._withhold()

    @in_turn
    def pause_all(self) -> None:
        """Return no records at all until `resume_all`; `poll` keeps the consumer in its group."""
        self._marks.pause_all()
        self._withhold()

    @in_turn
    def resume_all(self) -> None:
        """Undo `pause_all`. Partitions and topics that are paused themselves stay so."""
        self._marks.resume_all()
        self._withhold()

    def _withhold(self) -> None:
        """Let the fetcher be silent about what it has to, and about nothing else."""
        if self._fetcher:
            unread = self._carried.unread if self._carried else frozenset()
            self._fetcher.withhold(self._marks.among(self._assigned) | self._revoking | unread)

    def _forget_marks(self, partitions: Collection[TopicPartition]) -> None:
        """Partitions go.

        An eager rebalance revokes what it gives back at once: only with the new assignment it is
        known which of them have gone.
        """
        if not self._keeps_marks:
            self._leaving_marks.update(partitions)
            if not self._revokes_all:
                self._settle_marks(())
        if self._carried:
            self._carried.leave(partitions)

    def _settle_marks(self, assigned: Collection[TopicPartition]) -> None:
        """Partitions came: what did not come back after an eager revoke has gone."""
        self._marks.resume(self._leaving_marks.difference(assigned))
        self._leaving_marks.clear()

    def _subscribes(self, topic: str) -> bool:
        if isinstance(self._subscription, re.Pattern):
            return self._subscription.fullmatch(topic) is not None
        return topic in self._subscription
