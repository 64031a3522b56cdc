"""The session API that commits, probe and discovery may use, in the session's thread only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from dagster_rebalance.kafka.group_ports import GroupEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    import confluent_kafka
    from confluent_kafka import KafkaError

    from dagster_rebalance.core.model.events import LostReason
    from dagster_rebalance.core.model.offsets import TopicPartition


@dataclass(frozen=True, slots=True)
class HeldRevoke:
    """A revoke that was requested and is not released yet."""

    partitions: frozenset[TopicPartition]
    requested_at: float
    member_id: str


@dataclass(frozen=True, slots=True)
class UserCallback:
    """A call of a callback in the user's settings, for the thread that polls the member."""

    function: Callable[..., object]
    arguments: tuple[object, ...]


SessionEvent: TypeAlias = GroupEvent | UserCallback


class SessionView(Protocol):
    """The part of a `Session` that its collaborators use."""

    @property
    def consumer(self) -> confluent_kafka.Consumer:
        """The client."""

    @property
    def hold(self) -> HeldRevoke | None:
        """The revoke that was requested and is not released yet."""

    @property
    def end_reason(self) -> LostReason | None:
        """Why the membership has ended; None while it lasts."""

    @property
    def owned(self) -> frozenset[TopicPartition]:
        """The assigned partitions that are neither released nor lost."""

    def owns(self, partition: TopicPartition, events_taken: int) -> bool:
        """Return whether a partition is assigned, and the caller has taken the assignment event."""

    def end(self, reason: LostReason) -> None:
        """End the membership. The first reason stays."""

    def fail(self, error: KafkaError) -> None:
        """End the membership after a fatal error of the client."""

    def enqueue(self, event: SessionEvent) -> None:
        """Add an event for the caller's next poll."""

    def call_user(self, callback: str, *arguments: object) -> None:
        """Let the caller's next poll call a callback of the user's settings, if it is set."""

    def subscribe(self, topics: list[str]) -> None:
        """Subscribe to these topics. Without topics, leave the group, which causes a revoke."""
