"""What the parts of a session (commits, probe, discovery) need of it, in its thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import confluent_kafka
    from confluent_kafka import KafkaError

    from dagster_rebalance.core.model.events import LostReason
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.group_ports import MemberEvent


@dataclass(frozen=True, slots=True)
class HeldRevoke:
    """A revoke that was requested and is not released yet."""

    partitions: frozenset[TopicPartition]
    requested_at: float
    member_id: str


@dataclass(frozen=True, slots=True)
class UserCallback:
    """A callback of the user's settings is due.

    It is called by the thread that polls the member.
    """

    function: Callable[..., object]
    arguments: tuple[object, ...]


class SessionView(Protocol):
    """A session, as its parts see it."""

    @property
    def consumer(self) -> confluent_kafka.Consumer:
        """The client."""

    @property
    def hold(self) -> HeldRevoke | None:
        """The revoke that was requested and is not released yet."""

    @property
    def ended(self) -> LostReason | None:
        """Why the membership is over."""

    @property
    def owned(self) -> frozenset[TopicPartition]:
        """What is assigned and neither released nor lost."""

    def owns(self, partition: TopicPartition, heard: int) -> bool:
        """Return whether a partition is assigned and the caller has heard of that.

        `heard` counts the events that the caller had taken.
        """

    def end(self, reason: LostReason) -> None:
        """End the membership. The first reason stays."""

    def end_broken(self, error: KafkaError) -> None:
        """End the membership, because the client does nothing any more."""

    def tell(self, event: MemberEvent | UserCallback) -> None:
        """Let the caller's next poll return an event."""

    def call_user(self, callback: str, *arguments: object) -> None:
        """Let the caller's next poll call back what the user has set, if anything."""

    def subscribe(self, topics: list[str]) -> None:
        """Join the group for these topics, or change them; with none, leave it by a revoke."""
