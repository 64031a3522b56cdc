"""Which form of a callback is called, and several listeners in the place of one.

The forms follow the delegation chains of KAFKA-20385.
"""

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
    """A listener of the older kind."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_partitions_assigned(self, partitions: Collection[TopicPartition]) -> None:
        """Note it."""
        self.called.append("assigned")

    def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> None:
        """Note it."""
        self.called.append("revoked")


class OneArgumentWithLost(OneArgument):
    """One that tells losses from revokes."""

    def on_partitions_lost(self, partitions: Collection[TopicPartition]) -> None:
        """Note it."""
        self.called.append("lost")


class Both(ConsumerRebalanceListener):
    """One that is given the consumer where there is one, and can be called without."""

    def __init__(self) -> None:
        self.called: list[tuple[str, bool]] = []

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer | None = None
    ) -> None:
        """Note it."""
        self.called.append(("assigned", consumer is VIEW))

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer | None = None
    ) -> None:
        """Note it."""
        self.called.append(("revoked", consumer is VIEW))


class BothWithLost(Both):
    """The same for losses."""

    def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer | None = None
    ) -> None:
        """Note it."""
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
        """Note it."""
        self._note("assigned", partitions, consumer)

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Note it."""
        self._note("revoked", partitions, consumer)

    def _note(
        self, what: str, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        assert (partitions, consumer) == (GONE, VIEW)
        self.called.append(f"{self.name}{what}")
        if self.error is not None:
            raise self.error


def tell_everything(listener: AnyRebalanceListener) -> None:
    """Call all callbacks as the consumer does."""
    called = consumer_aware(listener)
    called.on_partitions_assigned(GONE, VIEW)
    called.on_partitions_revoked(GONE, VIEW)
    called.on_partitions_lost(GONE, VIEW)


def test_one_argument_methods_are_called_as_ever() -> None:
    """Legacy, one-argument methods only: each is called with the partitions alone.

    The chain of a loss is lost(partitions, view) -> lost(partitions) -> revoked(partitions).
    """
    listener = OneArgument()
    tell_everything(listener)
    assert listener.called == ["assigned", "revoked", "revoked"]


def test_an_overridden_one_argument_loss_is_no_revoke() -> None:
    """Legacy, with its own one-argument loss."""
    listener = OneArgumentWithLost()
    tell_everything(listener)
    assert listener.called == ["assigned", "revoked", "lost"]


def test_a_method_that_takes_the_consumer_is_given_it_and_called_once() -> None:
    """Legacy, all methods overridden: the two-argument form is called.

    The one-argument form is called only if the override calls it.
    """
    listener = BothWithLost()
    tell_everything(listener)
    assert listener.called == [("assigned", True), ("revoked", True), ("lost", True)]


def test_a_loss_that_is_not_overridden_ends_in_the_one_argument_revoke() -> None:
    """Legacy, two-argument assigned and revoked: a loss ends without the view.

    The chain is lost(partitions, view) -> lost(partitions) -> revoked(partitions).
    """
    listener = Both()
    tell_everything(listener)
    assert listener.called == [("assigned", True), ("revoked", True), ("revoked", False)]


def test_a_loss_of_a_consumer_aware_listener_is_a_revoke_with_the_consumer() -> None:
    """New: lost(partitions, view) -> revoked(partitions, view)."""
    listener = Aware()
    tell_everything(listener)
    assert listener.called == ["assigned", "revoked", "revoked"]


def test_the_older_listener_is_a_rebalance_listener() -> None:
    """KAFKA-20385: ConsumerRebalanceListener extends RebalanceListener."""
    assert isinstance(OneArgument(), RebalanceListener)
    assert issubclass(ConsumerRebalanceListener, RebalanceListener)


def test_an_older_listener_that_cannot_be_called_with_the_partitions_alone_is_refused() -> None:
    """A loss ends in that form, so the class itself must be refused when it is written.

    Otherwise the error would show up in the middle of the night.
    """
    with pytest.raises(
        TypeError, match="on_partitions_revoked cannot be called with the partitions alone"
    ):

        class Wrong(OneArgument):
            def on_partitions_revoked(  # type: ignore[override]
                self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
            ) -> None: ...


def test_listeners_must_say_what_they_do_on_assignments_and_revokes() -> None:
    """As the interfaces demand it."""
    with pytest.raises(TypeError, match="abstract"):
        RebalanceListener()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="abstract"):
        ConsumerRebalanceListener()  # type: ignore[abstract]


def test_what_is_no_listener_is_refused() -> None:
    """At once, and not with the first rebalance."""
    with pytest.raises(IllegalStateError, match="derive its class from RebalanceListener"):
        consumer_aware(cast("RebalanceListener", print))


def test_coroutines_are_refused_where_nobody_awaits_them() -> None:
    """They would never run, without a word."""

    class Coroutines(Aware):
        async def on_partitions_revoked(  # type: ignore[override]
            self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
        ) -> None: ...

    with pytest.raises(IllegalStateError, match="AsyncRebalanceAwareConsumer"):
        consumer_aware(Coroutines())


def test_a_composite_tells_its_listeners_in_their_order() -> None:
    """All kinds of them."""
    diary: list[str] = []
    older = OneArgumentWithLost()
    older.called = diary
    tell_everything(
        CompositeRebalanceListener(Aware("first ", diary), older, Aware("last ", diary))
    )
    assert diary == [
        *("first assigned", "assigned", "last assigned"),
        *("first revoked", "revoked", "last revoked"),
        *("first revoked", "lost", "last revoked"),
    ]


def test_a_listener_that_fails_does_not_silence_the_others_of_a_composite(
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
