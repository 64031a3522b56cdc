"""State of one consumer, shared by its operations, its rebalances and its callback consumers.

Owns the assignment of the API and the partitions whose records the fetcher withholds: paused
partitions, partitions to be revoked, and partitions whose carried pause mark is not read yet.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.kafka.consumer.call_guard import CallGuard
from dagster_rebalance.kafka.consumer.caller_commits import CallerCommits
from dagster_rebalance.kafka.consumer.pauses import CarriedPauses, Pauses
from dagster_rebalance.kafka.consumer.revoke_lists import RevokeLists

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.client.settings import Settings
    from dagster_rebalance.kafka.group_ports import ClusterView, GroupEvent, GroupMember
    from dagster_rebalance.kafka.reading.fetcher import Fetcher
    from dagster_rebalance.kafka.reading.start_positions import StartPositions

PauseMarksPolicy: TypeAlias = Literal["keep", "clear", "carry"]
"""Policy for the pause marks of partitions that leave the assignment."""


class ConsumerState:
    """Collaborators and assignment of one consumer; without a fetcher it reads no records."""

    def __init__(
        self,
        member: GroupMember,
        cluster: ClusterView,
        fetcher: Fetcher | None,
        starts: StartPositions,
        settings: Settings,
        *,
        pause_marks: PauseMarksPolicy,
        clock: Callable[[], float],
    ) -> None:
        if pause_marks not in get_args(PauseMarksPolicy):
            msg = f"pause_marks must be 'keep', 'clear' or 'carry', not '{pause_marks}'"
            raise ConfigurationError(msg)
        self.member = member
        self.cluster = cluster
        self.fetcher = fetcher
        self.group_id = settings.group_id
        self.clock = clock
        self.guard = CallGuard()
        self.subscription: Collection[str] | re.Pattern[str] = ()
        self.assigned: set[TopicPartition] = set()
        self.revoking: frozenset[TopicPartition] = frozenset()
        self.revokes = RevokeLists()
        self.pending_events: deque[GroupEvent] = deque()
        """Events of the member that are not handled yet."""
        self.is_delivered = False
        """Whether the caller received the result of the last poll."""
        self.pauses = Pauses()
        carries = pause_marks == "carry"
        self.commits = CallerCommits(
            member,
            self.assigned,
            self.pending_events,
            self.pauses.partitions if carries else frozenset(),
        )
        self.carried_pauses = (
            CarriedPauses(member, self.commits, self.pauses, self.position, clock)
            if carries
            else None
        )
        self._starts = starts
        self._keeps_marks = pause_marks == "keep"
        self._is_eager = settings.is_eager
        self._leaving_marks: set[TopicPartition] = set()

    def subscribes(self, topic: str) -> bool:
        """Return whether the subscription covers `topic`."""
        if isinstance(self.subscription, re.Pattern):
            return self.subscription.fullmatch(topic) is not None
        return topic in self.subscription

    def position(self, partition: TopicPartition, limit_s: float) -> int:
        """Return the position of an assigned partition; query Kafka if it is not known."""
        self.check_assigned("position", partition)
        known = self.fetcher.position(partition) if self.fetcher else None
        if known is not None and known.offset is not None:
            return known.offset
        start = known.start if known else "committed"
        starts, error = self._starts.find({partition: start}, limit_s)
        if error is not None:
            try:
                raise error
            finally:
                del error  # see `without_frames`
        if self.fetcher:
            self.fetcher.pin(partition, starts[partition].offset)
        return starts[partition].offset

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the position of every assigned partition that was read."""
        if self.fetcher is None:
            return {}
        positions = {tp: self.fetcher.position(tp) for tp in self.assigned}
        return {
            tp: OffsetAndMetadata(position.offset, leader_epoch=position.leader_epoch)
            for tp, position in positions.items()
            if position.offset is not None and position.is_read
        }

    def check_assigned(self, call: str, partition: TopicPartition) -> None:
        """Raise `IllegalStateError` if the partition is not assigned."""
        if partition not in self.assigned:
            msg = f"{call} of {partition}: it is not assigned to this consumer"
            raise IllegalStateError(msg)

    def withhold(self) -> None:
        """Set the partitions whose records the fetcher withholds."""
        if self.fetcher:
            unread = self.carried_pauses.unread if self.carried_pauses else frozenset()
            self.fetcher.withhold(self.pauses.among(self.assigned) | self.revoking | unread)

    def update_revoking(self) -> None:
        """Withhold exactly the partitions whose revoke is not released."""
        if self.revoking != self.revokes.unreleased:
            self.revoking = self.revokes.unreleased
            self.withhold()

    def unassign(self, partitions: Collection[TopicPartition]) -> None:
        """Remove partitions from the assignment, with their marks and records.

        With an eager strategy the marks stay until the new assignment: the rebalance also revokes
        partitions that it assigns again.
        """
        self.assigned.difference_update(partitions)
        if not self._keeps_marks:
            self._leaving_marks.update(partitions)
            if not self._is_eager:
                self.clear_marks_except(())
        if self.carried_pauses:
            self.carried_pauses.forget(partitions)
        if self.fetcher:
            self.fetcher.drop(partitions)

    def clear_marks_except(self, assigned: Collection[TopicPartition]) -> None:
        """Clear the marks of partitions that left and are not in the new assignment `assigned`."""
        self.pauses.partitions.difference_update(self._leaving_marks.difference(assigned))
        self._leaving_marks.clear()
