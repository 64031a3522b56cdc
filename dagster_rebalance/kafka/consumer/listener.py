"""Rebalance listeners: with a consumer argument (KAFKA-20385), without it, and composite ones."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from dagster_rebalance.core.model.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer

logger = logging.getLogger(__name__)

Callback: TypeAlias = Literal[
    "on_partitions_assigned", "on_partitions_revoked", "on_partitions_lost"
]
CALLBACKS: tuple[Callback, ...] = get_args(Callback)


class RebalanceListener(ABC):
    """Listener for assignment changes.

    If a callback raises, `poll` raises this exception once. The rebalance still completes, the
    other callbacks are called, and the consumer stays usable.
    """

    @abstractmethod
    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Handle partitions that were added to the assignment, possibly none.

        A seek or a pause takes effect before their first record.
        """

    @abstractmethod
    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Handle partitions that are given up when this call returns.

        They are still in the assignment: this is the last chance to commit. A delayed revoke calls
        this method when it is completed, not when it is requested.
        """

    def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Handle the loss of all partitions.

        They are no longer in the assignment, and commits for them fail. By default this calls
        `on_partitions_revoked`.
        """
        self.on_partitions_revoked(partitions, consumer)


@RebalanceListener.register
class ConsumerRebalanceListener(ABC):
    """Listener for assignment changes, without the consumer.

    Deprecated (KAFKA-20385): derive from `RebalanceListener`, whose methods receive the consumer.

    Each method may take the consumer as a second argument with a default, `(self, partitions,
    consumer=None)`, and then receives it. Unless `on_partitions_lost` is overridden, a loss calls
    `on_partitions_revoked` without the consumer, as in Kafka.

    Raises:
        TypeError: A subclass has a method that cannot be called with the partitions alone.
    """

    def __init_subclass__(cls, **options: Any) -> None:  # noqa: ANN401 - whatever other bases take
        super().__init_subclass__(**options)
        for name in CALLBACKS:
            if not _accepts(getattr(cls, name), 2):
                msg = (
                    f"{cls.__name__}.{name} cannot be called with the partitions alone: "
                    "give `consumer` a default, or use RebalanceListener"
                )
                raise TypeError(msg)

    @abstractmethod
    def on_partitions_assigned(self, partitions: Collection[TopicPartition]) -> None:
        """Handle partitions that were added to the assignment, possibly none."""

    @abstractmethod
    def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> None:
        """Handle partitions that are given up when this call returns."""

    def on_partitions_lost(self, partitions: Collection[TopicPartition]) -> None:
        """Handle the loss of all partitions; by default, call `on_partitions_revoked`."""
        self.on_partitions_revoked(partitions)


AnyRebalanceListener: TypeAlias = RebalanceListener | ConsumerRebalanceListener


class ForwardingListener(RebalanceListener):
    """Passes each callback, by its name, to one function."""

    def __init__(
        self,
        forward: Callable[[Callback, Collection[TopicPartition], RebalanceConsumer], None],
    ) -> None:
        self._forward = forward

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Forward the callback."""
        self._forward("on_partitions_assigned", partitions, consumer)

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Forward the callback."""
        self._forward("on_partitions_revoked", partitions, consumer)

    def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Forward the callback."""
        self._forward("on_partitions_lost", partitions, consumer)


class CompositeRebalanceListener(ForwardingListener):
    """Several listeners as one, called in the order given.

    If a listener raises, the others are still called. `poll` raises the first exception of a
    callback; further exceptions are logged.
    """

    def __init__(self, *listeners: AnyRebalanceListener) -> None:
        super().__init__(self._call_each)
        self._listeners = tuple(map(consumer_aware, listeners))

    def _call_each(
        self,
        callback: Callback,
        partitions: Collection[TopicPartition],
        consumer: RebalanceConsumer,
    ) -> None:
        first: Exception | None = None
        for listener in self._listeners:
            try:
                getattr(listener, callback)(partitions, consumer)
            except Exception as error:  # noqa: PERF203 - each listener fails alone
                if first is not None:
                    logger.exception(
                        "%s of %r failed too, after another listener", callback, listener
                    )
                first = first or error
        if first is not None:
            try:
                raise first
            finally:
                del first  # see `without_frames`


def consumer_aware(listener: AnyRebalanceListener) -> RebalanceListener:
    """Return a listener whose methods take the consumer.

    Raises:
        IllegalStateError: The object is not a listener, or its callbacks are coroutines, which only
            `AsyncRebalanceAwareConsumer` can await.
    """
    if not isinstance(listener, RebalanceListener | ConsumerRebalanceListener):
        msg = f"{listener!r} is not a rebalance listener: derive its class from RebalanceListener"
        raise IllegalStateError(msg)
    if any(inspect.iscoroutinefunction(getattr(listener, name, None)) for name in CALLBACKS):
        msg = (
            f"the callbacks of {listener!r} are coroutines: "
            "use AsyncRebalanceAwareConsumer, which awaits them"
        )
        raise IllegalStateError(msg)
    if isinstance(listener, RebalanceListener) and not isinstance(
        listener, ConsumerRebalanceListener
    ):
        return listener

    def call_legacy(
        callback: Callback, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        method = getattr(listener, callback)
        if _accepts(method, 2):
            method(partitions, consumer)
        else:
            method(partitions)

    return ForwardingListener(call_legacy)


def _accepts(function: Callable[..., None], count: int) -> bool:
    """Return whether a function accepts `count` positional arguments, `self` included."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True
