"""The consumer that runs in the thread of `AsyncRebalanceAwareConsumer`."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, TypeVar

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.kafka.client.owner_thread import OwnerThread
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from confluent_kafka import Message

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PollCaller:
    """The task that waits for a poll; it can be cancelled at any time.

    Either the task receives the result, or the result counts as undelivered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_served = False
        self.is_cancelled = False

    def cancel(self) -> bool:
        """Stop waiting; return whether a result was delivered that the task will not see."""
        with self._lock:
            self.is_cancelled = True
            return self._is_served

    def deliver(self) -> bool:
        """Deliver the result; return whether the task is still waiting."""
        with self._lock:
            self._is_served = True
            return not self.is_cancelled


class InterruptibleConsumer(RebalanceAwareConsumer):
    """A consumer whose polls run other operations while they wait, and can be ended early."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - those of RebalanceAwareConsumer
        super().__init__(*arguments, **options)
        self.owner = OwnerThread("consumer")
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiting = 0
        """Number of calls that wait for the running poll. If there are any, it returns early."""
        self._caller = PollCaller()

    @property
    def is_closed(self) -> bool:
        """Whether `close` has completed."""
        return self._state.guard.is_closed

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the process that created the consumer."""
        return self._state.guard.is_forked

    def poll_for(self, caller: PollCaller, poll: Callable[[], T]) -> T:
        """Poll until the timeout, or until the caller stops waiting."""
        self._caller = caller
        try:
            result = poll()
        except Exception:
            if caller.is_cancelled:
                logger.exception("a poll failed after its task was cancelled")
            raise
        if not caller.deliver():
            self.redeliver()
        return result

    def next_for_iteration(self) -> tuple[list[Message], bool]:
        """Poll once; return the next record, if any, and whether the iteration must end."""
        records = [] if self._woken else self._poll_ahead()
        is_over = self._woken and not records
        if is_over:
            self._woken = False
        # Plain steps, without a call: a signal handler may raise in between.
        self._state.is_delivered = True
        if self._state.fetcher:
            self._state.fetcher.is_open = False
        return records, is_over

    def is_quiet(self) -> bool:
        """Return whether the next poll would only return a record, if one was read ahead."""
        return not self._woken and self._state.guard.is_free and self._rebalances.is_quiet

    def redeliver(self) -> None:
        """Let the next poll return the records and the events of the last poll again."""
        self._rebalances.redeliver()

    def wait_for(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the event loop, and operations of other tasks until it returns."""
        if self.loop is None or self.loop.is_closed():
            coroutine.close()
            msg = "the event loop is closed: close the consumer before the loop ends"
            raise IllegalStateError(msg)
        self.owner.wait_for(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def _between_slices(self) -> None:
        self.owner.serve()

    def _has_to_return(self) -> bool:
        return super()._has_to_return() or self.waiting > 0 or self._caller.is_cancelled
