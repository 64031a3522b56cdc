"""The consumer as the thread of `AsyncRebalanceAwareConsumer` runs it.

Owns polls that let other calls through and can be ended early, what becomes of records whose caller
has left, and callbacks that are awaited. Must never decide which task may poll.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, TypeVar

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.kafka.aio.operations import AsyncRebalanceConsumer, marked
from dagster_rebalance.kafka.client.owner_thread import OwnerThread
from dagster_rebalance.kafka.consumer.consumer import DEFAULT_POLL_S, RebalanceAwareConsumer
from dagster_rebalance.kafka.consumer.listener import Callback, RebalanceListener

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine
    from typing import Any

    from confluent_kafka import Message

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.aio.listener import AsyncRebalanceListener
    from dagster_rebalance.kafka.consumer.callback_view import RebalanceConsumer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Caller:
    """Who waits for a poll, and may stop waiting at any moment.

    Either it gets the result, or the poll has told nobody.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._was_served = False
        self.has_left = False

    def leave(self) -> bool:
        """Stop waiting, and return whether a result was delivered that nobody will see."""
        with self._lock:
            self.has_left = True
            return self._was_served

    def deliver(self) -> bool:
        """Whether the caller is still there."""
        with self._lock:
            self._was_served = True
            return not self.has_left


class InterruptibleConsumer(RebalanceAwareConsumer):
    """A consumer whose polls let other calls through, and can be ended early."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - those of RebalanceAwareConsumer
        super().__init__(*arguments, **options)
        self.owner = OwnerThread("consumer")
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiting = 0
        """How many calls wait for the turn of a poll, which then returns early."""
        self._caller = Caller()

    @property
    def is_closed(self) -> bool:
        """Whether `close` has given everything up."""
        return self._turn.is_over

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process has made it, of which this one is a fork."""
        return self._turn.is_elsewhere

    def poll_for(self, caller: Caller, poll: Callable[[], T]) -> T:
        """Poll for as long as the caller waits."""
        self._caller = caller
        try:
            result = poll()
        except Exception:
            if caller.has_left:
                logger.exception("a poll that nobody waits for any more has failed")
            raise
        if not caller.deliver():
            self.untell()
        return result

    def next_for_iteration(self) -> tuple[list[Message], bool]:
        """Poll once for the next record; without one, whether the iteration has to end."""
        records = [] if self._woken else self._poll_once(DEFAULT_POLL_S, 1)
        is_over = self._woken and not records
        if is_over:
            self._woken = False
        # Plain steps, without a call: a signal handler may raise in between.
        self._is_told = True
        if self._fetcher:
            self._fetcher.is_open = False
        return records, is_over

    def untell(self) -> None:
        """Let the next poll return the records of the last one, and tell what it has found."""
        self._untell()

    def wait_for(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the event loop, and let operations through meanwhile."""
        if self.loop is None or self.loop.is_closed():
            coroutine.close()
            msg = "the event loop is closed: close the consumer before the loop ends"
            raise IllegalStateError(msg)
        self.owner.wait_for(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def _between_slices(self) -> None:
        self.owner.serve()

    def _has_to_return(self) -> bool:
        return super()._has_to_return() or self.waiting > 0 or self._caller.has_left


class AwaitingListener(RebalanceListener):
    """A listener whose callbacks are coroutines, called from the consumer's thread."""

    def __init__(self, consumer: InterruptibleConsumer, listener: AsyncRebalanceListener) -> None:
        self._consumer = consumer
        self._listener = listener

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Await the coroutine."""
        self._await("on_partitions_assigned", partitions, consumer)

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Await the coroutine."""
        self._await("on_partitions_revoked", partitions, consumer)

    def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Await the coroutine."""
        self._await("on_partitions_lost", partitions, consumer)

    def _await(
        self,
        callback: Callback,
        partitions: Collection[TopicPartition],
        consumer: RebalanceConsumer,
    ) -> None:
        view = AsyncRebalanceConsumer(self._consumer.owner, consumer)
        self._consumer.wait_for(marked(getattr(self._listener, callback)(partitions, view)))
