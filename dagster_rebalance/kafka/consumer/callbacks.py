"""Call rebalance listeners and commit callbacks, and defer their exceptions.

An exception never interrupts a rebalance: it is raised when the rebalance is complete.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dagster_rebalance.kafka.consumer.listener import (
    AnyRebalanceListener,
    Callback,
    RebalanceListener,
    consumer_aware,
)
from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.consumer.state import ConsumerState

logger = logging.getLogger(__name__)


class Callbacks:
    """The rebalance listener of one consumer, and the first exception of its callbacks."""

    def __init__(self, state: ConsumerState) -> None:
        self._state = state
        self._listener: RebalanceListener | None = None
        self._next: RebalanceListener | None = None
        self._error: Exception | None = None

    def set_listener(self, listener: AnyRebalanceListener | None) -> None:
        """Set the listener that the next `begin` puts into effect."""
        self._next = None if listener is None else consumer_aware(listener)

    def begin(self) -> None:
        """Put the listener that was set last into effect."""
        self._listener = self._next

    def notify(self, callback: Callback, partitions: Collection[TopicPartition]) -> None:
        """Call the listener with a callback consumer, which expires when the callback returns."""
        listener = self._listener
        if listener is None:
            return
        consumer = RebalanceConsumer(self._state)
        try:
            self.run(lambda: getattr(listener, callback)(tuple(sorted(partitions)), consumer))
        finally:
            consumer.expire()

    def run(self, function: Callable[[], object]) -> None:
        """Run a callback and defer its exception."""
        guard = self._state.guard
        outer, guard.in_callback = guard.in_callback, True
        try:
            function()
        except Exception as error:  # noqa: BLE001 - the user's code; the caller of `poll` gets it
            self.defer(error)
        finally:
            guard.in_callback = outer

    def defer(self, error: Exception) -> None:
        """Keep the first exception for the caller, and log further ones."""
        if self._error is not None:
            logger.error("a further failure in the same call", exc_info=error)
        self._error = self._error or error

    def raise_deferred(self) -> None:
        """Raise the deferred exception, once."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # see `without_frames`
