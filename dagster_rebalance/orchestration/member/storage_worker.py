"""What needs Dagster's storage, in a thread of its own while the member polls on.

Owns that storage which hangs costs no membership. Its clients have no time-out: a connection that a
firewall has dropped, or a database that is frozen, keeps its caller for minutes or hours. Jobs are
done one at a time and in order, but what the member's work depends on comes before what it does
not. One that hangs is overtaken after a while by a new thread with a new connection; its answer,
should it ever come, is thrown away, and whoever needs it asks again.
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
"""It doubles with each thread that hangs, so that a database that stays away for a day holds a
dozen threads and not a thousand."""
_SLOW_S = 3.0
_SAID_AFTER_S = 10.0
_MOST_PASSED_OVER = 8
"""How many jobs overtake one that can wait: storage that is slow may never be without others."""


@dataclass(frozen=True, eq=False)
class Job:
    """Something to be done with Dagster's storage.

    Attributes:
        what: What it is, for people, as the beginning of a sentence.
        work: Does it, in the thread of the storage.
        then: Makes an event of what `work` returned, in the thread of the member.
        slot: Of the jobs with the same slot only the newest waits; None for a job that nothing
            replaces.
        subject: While a job with an equal subject is being done, this one is not wanted; None for a
            job that is always wanted.
        is_repeated: Whether the member asks again if it fails.
        can_wait: Whether the work of the member does not depend on it.
    """

    what: str
    work: Callable[[], Any]
    then: Callable[[Any], Event | None] = lambda _: None
    slot: Hashable | None = None
    subject: object = None
    is_repeated: bool = False
    can_wait: bool = False


class StorageWorker:
    """Does the jobs of one member.

    Args:
        note: Gets a sentence when a job fails, is slow or hangs. It is called from any thread.
        start: Starts work, with a name for people. It should not wait; a simulator with a single
            thread does the work at once.
        clock: A monotonic clock.
        wake: Is called in the thread of the storage when there is an answer that the member's work
            depends on.
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
        self._is_at_work = False
        self._running: Job | None = None
        self._began_at = 0.0
        self._silent_since: float | None = None
        self._patience_s = _PATIENCE_S
        self._shift = 0
        self._passed_over = 0
        self._answers: SimpleQueue[Callable[[], Event | None]] = SimpleQueue()

    def ask(self, job: Job) -> None:
        """Have a job done. Does not wait."""
        with self._changed:
            if (
                job.subject is not None
                and self._running is not None
                and self._running.subject == job.subject
            ):
                return
            self._waiting[object() if job.slot is None else job.slot] = job
            if self._is_at_work:
                return
            self._is_at_work = True
            shift = self._shift
        self._begin(shift)

    def answers(self) -> Iterator[Callable[[], Event | None]]:
        """The answers to jobs that are over, oldest first.

        The member calls each in its thread; an answer may raise. Each is taken when it is its turn:
        what follows from one may take long, and takes in all that is answered by then. An older
        answer would come behind a newer one if it had been taken before.
        """
        while not self._answers.empty():
            yield self._answers.get()

    def look_after(self) -> None:
        """Let another thread go on when the one at work has hung for too long.

        The member calls this from time to time.
        """
        with self._changed:
            job, hung_s = self._running, self._clock() - self._began_at
            if job is None or hung_s < self._patience_s:
                return
            self._patience_s = min(2 * self._patience_s, _LONGEST_PATIENCE_S)
            self._shift += 1
            self._running = None
            self._is_at_work = bool(self._waiting)
            shift, goes_on = self._shift, self._is_at_work
        self._note(
            f"{job.what}: no answer of Dagster's storage for {hung_s:.0f} s; what needs it goes on "
            "over a new connection"
        )
        if goes_on:
            self._begin(shift)

    @property
    def silence(self) -> str | None:
        """A sentence when the storage has not answered for a while, or None."""
        with self._changed:
            job, since = self._running, self._silent_since
        silent_s = 0.0 if since is None else self._clock() - since
        if job is None or silent_s < _SAID_AFTER_S:
            return None
        return (
            f"Dagster's storage has not answered for {silent_s:.0f} s ({job.what}): the member "
            "stays in its group, and what needs "
            "the storage waits"
        )

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is done, but no longer than that, and drop what is left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_at_work, timeout_s)
            self._waiting.clear()
            self._is_at_work = False
            self._shift += 1

    def _begin(self, shift: int) -> None:
        """Begin a shift. Nobody has to be woken by one that is done in the thread of the member."""
        self._start("storage", partial(self._work, shift, threading.get_ident()))

    def _work(self, shift: int, member: int) -> None:
        while True:
            with self._changed:
                if shift != self._shift:
                    return
                if not self._waiting:
                    self._is_at_work = False
                    self._changed.notify_all()
                    return
                job = self._running = self._waiting.pop(self._next_slot())
                self._began_at = self._clock()
                self._silent_since = (
                    self._began_at if self._silent_since is None else self._silent_since
                )
            answer = self._done(job)
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
        """Choose the next job. One that can wait does so for a few other ones, and not for ever."""
        oldest = next(iter(self._waiting))
        urgent = next((slot for slot, job in self._waiting.items() if not job.can_wait), oldest)
        self._passed_over = 0 if urgent == oldest else self._passed_over + 1
        if self._passed_over <= _MOST_PASSED_OVER:
            return urgent
        self._passed_over = 0
        return oldest

    def _done(self, job: Job) -> Callable[[], Event | None] | None:
        try:
            return partial(job.then, job.work())
        except (ConfigurationError, IllegalStateError) as error:
            return partial(_raise, error)
        except Exception as error:
            consequence = " and is tried again" if job.is_repeated else ""
            self._note(f"{job.what} failed{consequence}: {error}")
            logger.warning("%s failed%s", job.what, consequence, exc_info=True)
            return None


def _raise(error: Exception) -> NoReturn:
    raise error
