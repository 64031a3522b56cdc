"""The storage worker: accesses Dagster's storage in another thread, so the member keeps polling.

The clients of the storage have no timeout: a dropped connection or a frozen database blocks its
caller for minutes or hours. Jobs run one at a time and in order, but jobs that partitions wait for
come first. A job that hangs is overtaken by a new thread with a new connection; its late answer is
dropped, and the engine asks again.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from dagster_rebalance.core.model.events import Event

logger = logging.getLogger(__name__)
_PATIENCE_S = 60.0
_LONGEST_PATIENCE_S = 960.0
"""The patience doubles with each thread that hangs: a database that is away for a day holds a dozen
threads, not a thousand."""
_SLOW_S = 3.0
_SILENCE_S = 10.0
_MOST_PASSED_OVER = 8
"""How many jobs overtake one that can wait: slow storage may never run out of them."""


@dataclass(frozen=True, eq=False)
class Job:
    """An access to Dagster's storage.

    Attributes:
        what: A description of the job, as the beginning of a sentence.
        work: Runs in the storage thread.
        then: Makes an event of the result of `work`, in the thread of the member.
        slot: Of the waiting jobs with the same slot only the newest is kept; None keeps all.
        subject: While a job with an equal subject runs, this job is dropped; None never drops it.
        is_repeated: Whether the engine asks again if the job fails.
        can_wait: Whether no partition waits for the job.
    """

    what: str
    work: Callable[[], Any]
    then: Callable[[Any], Event | None] = lambda _: None
    slot: Hashable | None = None
    subject: object = None
    is_repeated: bool = False
    can_wait: bool = False


class StorageWorker:
    """Runs the jobs of one member.

    Args:
        note: Receives a sentence when a job fails, is slow or hangs, from any thread.
        start: Starts work under a name without waiting. A simulator with a single thread runs the
            work immediately.
        clock: A monotonic clock.
        wake: Called in the storage thread when an answer arrives that partitions wait for.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        start: Callable[[str, Callable[[], None]], None],
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._note = note
        self._start = start
        self._clock = clock
        self._wake = wake
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, Job] = {}
        self._is_busy = False
        self._running: Job | None = None
        self._began_at = 0.0
        self._silent_since: float | None = None
        self._patience_s = _PATIENCE_S
        self._shift = 0
        self._passed_over = 0
        self._answers: SimpleQueue[Callable[[], Event | None]] = SimpleQueue()

    def ask(self, job: Job) -> None:
        """Queue a job."""
        with self._changed:
            if (
                job.subject is not None
                and self._running is not None
                and self._running.subject == job.subject
            ):
                return
            self._waiting[object() if job.slot is None else job.slot] = job
            if self._is_busy:
                return
            self._is_busy = True
            shift = self._shift
        self._begin(shift)

    def cancel(self, slot: Hashable) -> None:
        """Drop the waiting job of a slot. A running job is not affected."""
        with self._changed:
            self._waiting.pop(slot, None)

    def answers(self) -> Iterator[Callable[[], Event | None]]:
        """Yield the answers, oldest first. The member calls each in its thread; it may raise.

        Take an answer only after the previous one was handled: handling may take answers itself,
        and a newer answer must not be handled before an older one.
        """
        while not self._answers.empty():
            yield self._answers.get()

    def look_after(self) -> None:
        """Continue in a new thread if the running job has hung for too long. Call this often."""
        with self._changed:
            job, hung_s = self._running, self._clock() - self._began_at
            if job is None or hung_s < self._patience_s:
                return
            self._patience_s = min(2 * self._patience_s, _LONGEST_PATIENCE_S)
            self._shift += 1
            self._running = None
            self._is_busy = bool(self._waiting)
            shift, goes_on = self._shift, self._is_busy
        self._note(
            f"{job.what}: no answer of Dagster's storage for {hung_s:.0f} s; its requests "
            "continue on a new connection"
        )
        if goes_on:
            self._begin(shift)

    @property
    def silence(self) -> str | None:
        """A sentence if the storage has not answered for a while, or None."""
        with self._changed:
            job, since = self._running, self._silent_since
        silent_s = 0.0 if since is None else self._clock() - since
        if job is None or silent_s < _SILENCE_S:
            return None
        return (
            f"Dagster's storage has not answered for {silent_s:.0f} s ({job.what}): the member "
            "stays in its group, and requests to the storage wait"
        )

    def finish(self, timeout_s: float) -> None:
        """Wait for the jobs within the timeout, and drop the rest."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy, timeout_s)
            self._waiting.clear()
            self._is_busy = False
            self._shift += 1

    def _begin(self, shift: int) -> None:
        self._start("storage", partial(self._work, shift, threading.get_ident()))

    def _work(self, shift: int, member: int) -> None:
        """Run jobs until none waits, or a new shift has begun. `member` needs no wake-up."""
        while True:
            with self._changed:
                if shift != self._shift:
                    return
                if not self._waiting:
                    self._is_busy = False
                    self._changed.notify_all()
                    return
                job = self._running = self._waiting.pop(self._next_slot())
                self._began_at = self._clock()
                self._silent_since = (
                    self._began_at if self._silent_since is None else self._silent_since
                )
            answer = self._run(job)
            with self._changed:
                if shift != self._shift:
                    return
                took_s = self._clock() - self._began_at
                self._running = self._silent_since = None
                self._patience_s = _PATIENCE_S
                if answer is not None:
                    self._answers.put(answer)
            if answer is not None and not job.can_wait and threading.get_ident() != member:
                self._wake()
            if took_s > _SLOW_S:
                self._note(f"{job.what} took {took_s:.1f} s")

    def _next_slot(self) -> Hashable:
        oldest = next(iter(self._waiting))
        urgent = next((slot for slot, job in self._waiting.items() if not job.can_wait), oldest)
        self._passed_over = 0 if urgent == oldest else self._passed_over + 1
        if self._passed_over <= _MOST_PASSED_OVER:
            return urgent
        self._passed_over = 0
        return oldest

    def _run(self, job: Job) -> Callable[[], Event | None] | None:
        try:
            return partial(job.then, job.work())
        except (ConfigurationError, IllegalStateError) as error:
            return partial(_raise, error)
        except Exception as error:
            consequence = " and is retried" if job.is_repeated else ""
            self._note(f"{job.what} failed{consequence}: {error}")
            logger.warning("%s failed%s", job.what, consequence, exc_info=True)
            return None


def _raise(error: Exception) -> NoReturn:
    raise error
