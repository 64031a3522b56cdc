"""Rebalance listeners come in two forms: with the consumer, and the older one without it.

KAFKA-20385 describes the form that receives the consumer. Several listeners can take the place of
one.

Owns which form of a callback is called. Must never decide when: that is the consumer's.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dagster_rebalance.core.model.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.consumer.callback_view import RebalanceConsumer

logger = logging.getLogger(__name__)

Callback: TypeAlias = Literal[
    "on_partitions_assigned", "on_partitions_revoked", "on_partitions_lost"
]
CALLBACKS: tuple[Callback, ...] = (
    "on_partitions_assigned",
    "on_partitions_revoked",
    "on_partitions_lost",
)


class RebalanceListener(ABC):
    """Told when partitions come and go.

    An exception reaches the caller of `poll`, once; the rebalance completes, the other callbacks
    are still called, and the consumer stays usable.
    """

    @abstractmethod
    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Partitions were added to the assignment, possibly none.

        A seek or a pause holds before their first record.
        """

    @abstractmethod
    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Partitions are given up with the return from this call.

        They are still in the assignment: it is the last chance to commit.

        With delayed revokes this is the completion of the revoke, not the request for it.
        """

    def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Partitions were taken away: all that the consumer had.

        They are not in the assignment any more, and commits for them fail.

        Does what `on_partitions_revoked` does unless it is overridden.
        """
        self.on_partitions_revoked(partitions, consumer)


@RebalanceListener.register
class ConsumerRebalanceListener(ABC):
    """Told when partitions come and go, without the consumer.

    Deprecated (KAFKA-20385): derive from `RebalanceListener`, whose methods are given the consumer.

    Each method may take the consumer as a second argument with a default, `(self, partitions,
    consumer=None)`, and is given it then. A loss that is not overridden is told to
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
        """Partitions were added to the assignment, possibly none."""

    @abstractmethod
    def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> None:
        """Partitions are given up with the return from this call."""

    def on_partitions_lost(self, partitions: Collection[TopicPartition]) -> None:
        """Partitions were taken away.

        Does what `on_partitions_revoked` does unless it is overridden.
        """
        self.on_partitions_revoked(partitions)


AnyRebalanceListener: TypeAlias = RebalanceListener | ConsumerRebalanceListener
"""What may be registered."""


class CompositeRebalanceListener(RebalanceListener):
    """Several listeners in the place of one, called in the order given.

    One that fails does not silence the others.

    The first exception of a callback reaches the caller of `poll`; further ones are logged.
    """

    def __init__(self, *listeners: AnyRebalanceListener) -> None:
        self._listeners = tuple(map(consumer_aware, listeners))

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Tell each listener."""
        self._tell_each("on_partitions_assigned", partitions, consumer)

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Tell each listener."""
        self._tell_each("on_partitions_revoked", partitions, consumer)

    def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Tell each listener."""
        self._tell_each("on_partitions_lost", partitions, consumer)

    def _tell_each(
        self,
        callback: Callback,
        partitions: Collection[TopicPartition],
        consumer: RebalanceConsumer,
    ) -> None:
        first: Exception | None = None
        for listener in self._listeners:
            try:
                getattr(listener, callback)(partitions, consumer)
            except Exception as problem:  # noqa: PERF203 - each listener fails alone
                if first is not None:
                    logger.exception(
                        "%s of %r failed too, after another listener", callback, listener
                    )
                first = first or problem
        if first is not None:
            raise first


class _Delegating(RebalanceListener):
    """A listener of the older kind, called in the form that it has."""

    def __init__(self, listener: ConsumerRebalanceListener) -> None:
        self._listener = listener

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        _call(self._listener.on_partitions_assigned, partitions, consumer)

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        _call(self._listener.on_partitions_revoked, partitions, consumer)

    def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        _call(self._listener.on_partitions_lost, partitions, consumer)


def consumer_aware(listener: AnyRebalanceListener) -> RebalanceListener:
    """The listener in the form that the consumer calls.

    Raises:
        IllegalStateError: It is no listener, or its callbacks are coroutines, which only
            `AsyncRebalanceAwareConsumer` can await.
    """
    if not isinstance(listener, RebalanceListener | ConsumerRebalanceListener):
        msg = f"{listener!r} is no rebalance listener: derive its class from RebalanceListener"
        raise IllegalStateError(msg)
    if has_coroutines(listener):
        msg = (
            f"the callbacks of {listener!r} are coroutines: "
            "use AsyncRebalanceAwareConsumer, which awaits them"
        )
        raise IllegalStateError(msg)
    return _Delegating(listener) if isinstance(listener, ConsumerRebalanceListener) else listener


def has_coroutines(listener: object) -> bool:
    """Whether a callback has to be awaited."""
    return any(inspect.iscoroutinefunction(getattr(listener, name, None)) for name in CALLBACKS)


def _call(
    method: Callable[..., None], partitions: Collection[TopicPartition], consumer: RebalanceConsumer
) -> None:
    if _accepts(method, 2):
        method(partitions, consumer)
    else:
        method(partitions)


def _accepts(function: Callable[..., None], count: int) -> bool:
    """Return whether a function accepts `count` positional arguments.

    The count includes `self` of an unbound method.
    """
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True
