"""Consumers of a fake group, and a listener that records its callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.consumer.listener import RebalanceListener

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer
    from dagster_rebalance.testing.fake_group import FakeGroup, FakeMember

CONFIG = {
    "bootstrap.servers": "unreachable:9092",
    "group.id": "etl",
    "auto.offset.reset": "earliest",
}
LATEST = {key: value for key, value in CONFIG.items() if key != "auto.offset.reset"}
"""Without a setting, a partition without a committed offset starts at its end."""
P0, P1, P2, P3 = EVERYTHING = tuple(TopicPartition("orders", number) for number in range(4))


def consumer_of(
    group: FakeGroup,
    *,
    member: FakeMember | None = None,
    config: Mapping[str, Any] = CONFIG,
    subscribed: bool = True,
    **options: Any,  # noqa: ANN401 - those of the consumer
) -> RebalanceAwareConsumer:
    """A consumer that subscribes to `orders` and reads no records unless `fetch` is set."""
    consumer = RebalanceAwareConsumer(
        config,
        member=member or group.member(),
        cluster=group,
        clock=group.clock,
        **{"fetch": False, **options},
    )
    if subscribed:
        consumer.subscribe(["orders"])
    return consumer


def member_of(consumer: RebalanceAwareConsumer) -> FakeMember:
    return cast("FakeMember", consumer._state.member)


def owner(
    group: FakeGroup,
    listener: RebalanceListener | None = None,
    **options: Any,  # noqa: ANN401
) -> RebalanceAwareConsumer:
    """A consumer that owns all partitions."""
    consumer = consumer_of(group, **options)
    consumer.set_rebalance_listener(listener)
    consumer.poll(0.1)
    assert consumer.assignment() == set(EVERYTHING)
    return consumer


def revoke_requested(
    group: FakeGroup,
    listener: RebalanceListener | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[RebalanceAwareConsumer, RebalanceAwareConsumer]:
    """A consumer with a revoke request for P2 and P3, and the member that waits for them."""
    blue, green = owner(group, listener, **options), consumer_of(group)
    poll(green, blue)
    return blue, green


def poll(*consumers: RebalanceAwareConsumer) -> None:
    """Poll each of the consumers once."""
    for consumer in consumers:
        consumer.poll(0.1)


def bug(_partitions: Collection[TopicPartition], _consumer: RebalanceConsumer) -> None:
    """Raise in a callback."""
    msg = "a bug of the user's"
    raise ValueError(msg)


def ignore(_partitions: Collection[TopicPartition], _consumer: RebalanceConsumer) -> None:
    """Do nothing in a callback."""


class Listener(RebalanceListener):
    """Records its callbacks in `calls`, and runs functions in them.

    It does not override `on_partitions_lost`.
    """

    def __init__(
        self,
        assigned: Callable[[Collection[TopicPartition], RebalanceConsumer], object] = ignore,
        revoked: Callable[[Collection[TopicPartition], RebalanceConsumer], object] = ignore,
    ) -> None:
        self.calls: list[tuple[str, set[TopicPartition]]] = []
        self._assigned = assigned
        self._revoked = revoked

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Record the callback."""
        self.calls.append(("assigned", set(partitions)))
        self._assigned(partitions, consumer)

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Record the callback."""
        self.calls.append(("revoked", set(partitions)))
        self._revoked(partitions, consumer)


class LossListener(Listener):
    """A listener that overrides `on_partitions_lost`."""

    def __init__(
        self, lost: Callable[[Collection[TopicPartition], RebalanceConsumer], object] = ignore
    ) -> None:
        super().__init__()
        self._lost = lost

    def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Record the callback."""
        self.calls.append(("lost", set(partitions)))
        self._lost(partitions, consumer)
