"""Listeners: the form of a callback that is called (KAFKA-20385), and composites."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import pytest

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.consumer.listener import (
    AnyRebalanceListener,
    CompositeRebalanceListener,
    ConsumerRebalanceListener,
    RebalanceListener,
    consumer_aware,
)
from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.kafka.consumer.state import ConsumerState

GONE = (TopicPartition("orders", 0),)
VIEW = RebalanceConsumer(cast("ConsumerState", None))


class OneArgument(ConsumerRebalanceListener):
    """A `ConsumerRebalanceListener`."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_partitions_assigned(self, partitions: Collection[TopicPartition]) -> None:
        self.called.append("assigned")

    def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> None:
        self.called.append("revoked")


class OneArgumentWithLost(OneArgument):
    """One that overrides the loss."""

    def on_partitions_lost(self, partitions: Collection[TopicPartition]) -> None:
        self.called.append("lost")


class Both(ConsumerRebalanceListener):
    """One whose methods take the consumer, with a default."""

    def __init__(self) -> None:
        self.called: list[tuple[str, bool]] = []

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer | None = None
    ) -> None:
        self.called.append(("assigned", consumer is VIEW))

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer | None = None
    ) -> None:
        self.called.append(("revoked", consumer is VIEW))


class BothWithLost(Both):
    """The same for losses."""

    def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer | None = None
    ) -> None:
        self.called.append(("lost", consumer is VIEW))


class Aware(RebalanceListener):
    """A listener that is given the consumer."""

    def __init__(
        self, name: str = "", diary: list[str] | None = None, error: Exception | None = None
    ) -> None:
        self.name = name
        self.called = [] if diary is None else diary
        self.error = error

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        self._note("assigned", partitions, consumer)

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        self._note("revoked", partitions, consumer)

    def _note(
        self, what: str, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        assert (partitions, consumer) == (GONE, VIEW)
        self.called.append(f"{self.name}{what}")
        if self.error is not None:
            raise self.error


def call_all(listener: AnyRebalanceListener) -> None:
    called = consumer_aware(listener)
    called.on_partitions_assigned(GONE, VIEW)
    called.on_partitions_revoked(GONE, VIEW)
    called.on_partitions_lost(GONE, VIEW)


def test_one_argument_methods_are_called_with_the_partitions() -> None:
    """The chain of a loss is lost(partitions, view) -> lost(partitions) -> revoked(partitions)."""
    listener = OneArgument()
    call_all(listener)
    assert listener.called == ["assigned", "revoked", "revoked"]


def test_overridden_one_argument_loss_is_called() -> None:
    listener = OneArgumentWithLost()
    call_all(listener)
    assert listener.called == ["assigned", "revoked", "lost"]


def test_two_argument_method_receives_the_consumer_and_is_called_once() -> None:
    listener = BothWithLost()
    call_all(listener)
    assert listener.called == [("assigned", True), ("revoked", True), ("lost", True)]


def test_loss_that_is_not_overridden_calls_the_one_argument_revoke() -> None:
    """The chain is lost(partitions, view) -> lost(partitions) -> revoked(partitions)."""
    listener = Both()
    call_all(listener)
    assert listener.called == [("assigned", True), ("revoked", True), ("revoked", False)]


def test_loss_calls_revoked_with_the_consumer_by_default() -> None:
    listener = Aware()
    call_all(listener)
    assert listener.called == ["assigned", "revoked", "revoked"]


def test_consumer_rebalance_listener_is_a_rebalance_listener() -> None:
    """KAFKA-20385: ConsumerRebalanceListener extends RebalanceListener."""
    assert isinstance(OneArgument(), RebalanceListener)
    assert issubclass(ConsumerRebalanceListener, RebalanceListener)


def test_consumer_rebalance_listener_that_requires_the_consumer_is_refused() -> None:
    """A loss calls that form; the class is refused when it is defined."""
    with pytest.raises(
        TypeError, match="on_partitions_revoked cannot be called with the partitions alone"
    ):

        class Wrong(OneArgument):
            def on_partitions_revoked(  # type: ignore[override]
                self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
            ) -> None: ...


def test_listener_without_assigned_and_revoked_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        RebalanceListener()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="abstract"):
        ConsumerRebalanceListener()  # type: ignore[abstract]


def test_object_that_is_no_listener_is_refused() -> None:
    with pytest.raises(IllegalStateError, match="derive its class from RebalanceListener"):
        consumer_aware(cast("RebalanceListener", print))


def test_coroutine_callbacks_are_refused_without_asyncio() -> None:
    class Coroutines(Aware):
        async def on_partitions_revoked(  # type: ignore[override]
            self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
        ) -> None: ...

    with pytest.raises(IllegalStateError, match="AsyncRebalanceAwareConsumer"):
        consumer_aware(Coroutines())


def test_composite_calls_its_listeners_in_their_order() -> None:
    diary: list[str] = []
    older = OneArgumentWithLost()
    older.called = diary
    call_all(CompositeRebalanceListener(Aware("first ", diary), older, Aware("last ", diary)))
    assert diary == [
        *("first assigned", "assigned", "last assigned"),
        *("first revoked", "revoked", "last revoked"),
        *("first revoked", "lost", "last revoked"),
    ]


def test_composite_calls_all_listeners_although_one_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first exception is raised, further ones are logged."""
    diary: list[str] = []
    composite = CompositeRebalanceListener(
        Aware("a ", diary, ValueError("first")),
        Aware("b ", diary, KeyError("second")),
        Aware("c ", diary),
    )
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="first"):
        composite.on_partitions_revoked(GONE, VIEW)
    assert diary == ["a revoked", "b revoked", "c revoked"]
    assert "second" in caplog.text
