"""Calls the user's code back, and keeps what it raised until the rebalance is complete.

Owns which listener is in effect, how long a view lives, and which exception reaches the caller.
Must never let an exception interrupt what the consumer is doing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dagster_rebalance.kafka.consumer.callback_view import RebalanceConsumer
from dagster_rebalance.kafka.consumer.listener import (
    AnyRebalanceListener,
    Callback,
    RebalanceListener,
    consumer_aware,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.consumer.guard import CallGuard
    from dagster_rebalance.kafka.consumer.operations import ConsumerOperations

logger = logging.getLogger(__name__)


class Callbacks:
    """What the user wants to be told, and what came of telling it.

    Args:
        turn: Of the consumer; told while a callback runs.
    """

    def __init__(self, turn: CallGuard) -> None:
        self._turn = turn
        self._listener: RebalanceListener | None = None
        self._next: RebalanceListener | None = None
        self._problem: Exception | None = None

    def listen(self, listener: AnyRebalanceListener | None) -> None:
        """Who is told from the next `begin` on.

        Raises:
            IllegalStateError: It is no listener.
        """
        self._next = None if listener is None else consumer_aware(listener)

    def begin(self) -> None:
        """A call of the user's begins: the listener that was set last takes effect."""
        self._listener = self._next

    def tell(
        self,
        callback: Callback,
        partitions: Collection[TopicPartition],
        consumer: ConsumerOperations,
    ) -> None:
        """Call the listener, if there is one, with a consumer view that ends with the call."""
        listener = self._listener
        if listener is None:
            return
        view = RebalanceConsumer(consumer)
        try:
            self.run(lambda: getattr(listener, callback)(tuple(sorted(partitions)), view))
        finally:
            view.expire()

    def run(self, function: Callable[[], object]) -> None:
        """Run something whose exception must wait."""
        outer, self._turn.in_callback = self._turn.in_callback, True
        try:
            function()
        except Exception as problem:  # noqa: BLE001 - it is the user's code, and reaches the user
            self.note(problem)
        finally:
            self._turn.in_callback = outer

    def note(self, problem: Exception) -> None:
        """Keep the first exception for the caller, and log further ones."""
        if self._problem is not None:
            logger.error("a further failure in the same call", exc_info=problem)
        self._problem = self._problem or problem

    def raise_noted(self) -> None:
        """Raise what was noted, once."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
