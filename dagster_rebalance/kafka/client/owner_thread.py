"""A thread that owns a client or a consumer, and runs the jobs of other threads in order.

A job that waits (a poll, an awaited callback) may serve `nested` jobs while it waits: a worker may
commit while the callback waits for that worker. Never runs two jobs at a time.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_rebalance.core.model.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class _Job:
    def __init__(self, function: Callable[[], Any], unfinished: set[_Job], *, nested: bool) -> None:
        self.function = function
        self.nested = nested
        self.future: Future[Any] = Future()
        self._unfinished = unfinished
        unfinished.add(self)

    def run(self) -> None:
        is_wanted = self.future.set_running_or_notify_cancel()
        try:
            result = self.function() if is_wanted else None
        except BaseException as problem:  # noqa: BLE001 - the future passes it to its waiter
            self._unfinished.discard(self)
            self.future.set_exception(problem)
        else:
            self._unfinished.discard(self)
            if is_wanted:
                self.future.set_result(result)


class OwnerThread:
    """A thread with a queue of jobs."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._postponed: deque[_Job] = deque()
        self._unfinished: set[_Job] = set()
        self._stopped = False
        self._process = os.getpid()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[[], T], *, nested: bool = True) -> Future[T]:
        """Run a function. If `nested`, it also runs while a job that is not nested waits."""
        if os.getpid() != self._process:
            msg = "the consumer was created in the parent process of this fork: create one here"
            raise IllegalStateError(msg)
        if self._stopped:
            msg = "the consumer is closed: create a new one"
            raise IllegalStateError(msg)
        job = _Job(function, self._unfinished, nested=nested)
        self._jobs.put(job)
        return job.future

    @property
    def is_idle(self) -> bool:
        """Whether all submitted jobs have ended."""
        return not self._unfinished

    def serve(self, timeout_s: float = 0.0) -> None:
        """Wait for the first nested job, and run all that are queued. Only for use by a job."""
        if timeout_s:
            with suppress(queue.Empty):
                self._run_or_postpone(self._jobs.get(timeout=timeout_s))
        while not self._jobs.empty():
            self._run_or_postpone(self._jobs.get())

    def wait_for(self, future: Future[T]) -> T:
        """Wait for a future, and run nested jobs until it is done. Only for use by a job."""
        future.add_done_callback(lambda _: self._jobs.put(None))
        while not future.done():
            self._run_or_postpone(self._jobs.get())
        return future.result()

    def stop(self) -> None:
        """Accept no more jobs, and end the thread after the submitted jobs."""
        self._stopped = True
        self._jobs.put(None)

    def _run_or_postpone(self, job: _Job | None) -> None:
        if job is not None and job.nested:
            job.run()
        elif job is not None:
            self._postponed.append(job)

    def _work(self) -> None:
        while self._postponed or not self._stopped or not self._jobs.empty():
            job = self._postponed.popleft() if self._postponed else self._jobs.get()
            if job is not None:
                job.run()
