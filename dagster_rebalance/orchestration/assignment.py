"""What Kafka did to the assignment, as the driver has to hear of it.

Owns the order: a partition that was lost and assigned again within one poll is told as lost first. It must never take for
released what the driver has not released: what is gone without that was lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.consumer.events import LostReason
from dagster_rebalance.consumer.listener import RebalanceListener
from dagster_rebalance.core import events as seen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from dagster_rebalance.consumer.rebalance_aware import RebalanceAwareConsumer
    from dagster_rebalance.consumer.view import RebalanceConsumer
    from dagster_rebalance.core.partition import TopicPartition


class AssignmentWitness(RebalanceListener):
    """Keeps what happened within one poll."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, tuple[TopicPartition, ...]]] = []

    def on_partitions_assigned(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:  # noqa: ARG002 - the listener's signature
        """Keep it."""
        self._seen.append(("assigned", tuple(partitions)))

    def on_partitions_revoked(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:  # noqa: ARG002
        """Keep it."""
        self._seen.append(("revoked", tuple(partitions)))

    def on_partitions_lost(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:  # noqa: ARG002
        """Keep it."""
        self._seen.append(("lost", tuple(partitions)))

    def events(self, consumer: RebalanceAwareConsumer, owned: Collection[TopicPartition]) -> Iterator[seen.Event]:
        """What has happened since the last call. Each event has to be told before the next one is taken: it changes what is owned."""
        happened, self._seen = self._seen, []
        reasons = consumer.lost_reasons()
        for change, partitions in happened:
            if change == "assigned":
                yield from _event(seen.PartitionsAssigned, partitions)
            elif change == "revoked":
                yield from _event(seen.PartitionsLost, tuple(p for p in partitions if p in owned))
            else:
                overtaken = tuple(p for p in partitions if reasons.get(p) is LostReason.SUPERSEDED)
                yield from _event(seen.HoldSuperseded, overtaken)
                yield from _event(seen.PartitionsLost, tuple(p for p in partitions if p not in overtaken))


def _event(kind: Callable[[tuple[TopicPartition, ...]], seen.Event], partitions: tuple[TopicPartition, ...]) -> Iterator[seen.Event]:
    if partitions:
        yield kind(partitions)
