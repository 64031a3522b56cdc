"""The storage worker: accesses Dagster's storage in another thread, so the member keeps polling.

The clients of the storage have no timeout: a dropped connection or a frozen database blocks its
caller for minutes or hours. Jobs run one at a time and in order, but jobs that partitions wait for
come first. If a job hangs, the next jobs run concurrently in a new thread with a new connection.
The late result of the hung job is dropped, but its late writes are stored: no job may overwrite
newer state. No job may run in the thread of the member.
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
_HANG_TIMEOUT_S = 60.0
_MAX_HANG_TIMEOUT_S = 960.0
"""The timeout doubles with each thread that hangs, and begins again after an answer."""
_MAX_HUNG = 24
"""The number of hung threads that are replaced. They suffice for five hours without an answer, and
the operating system ends a dead connection before that."""
_SLOW_S = 3.0
_SILENCE_S = 10.0
_MAX_PASSED_OVER = 8
"""The maximum number of urgent jobs that run before the oldest job that can wait. With slow
storage, urgent jobs may never run out."""
_REPEAT_AFTER_S = 5.0
_MAX_KEPT = 200
_MAX_TRIES = 5
"""The maximum number of tries of a kept job while other jobs succeed: the job is at fault."""


@dataclass(frozen=True, eq=False)
class Job:
    """An access to Dagster's storage.

    Attributes:
        what: A description of the job, as the beginning of a message.
        work: The access. Runs in a storage thread. If it hangs, later jobs run concurrently, and it
            may still complete after them: it must not overwrite newer state. A repeated job may be
            carried out twice.
        then: Converts the result of `work` to an event. Runs in the thread of the member.
        slot: Of the waiting jobs with the same slot, only the newest is kept, and takes its place
            in the queue; None keeps all.
        subject: While a job with an equal subject runs, this job is dropped; None never drops it.
        is_repeated: Whether the engine asks again if the job fails.
        is_kept: Whether this worker repeats the job if it fails or hangs, before later kept jobs.
            At most 200 are kept.
        can_wait: Whether partitions make progress without its result.
    """

    what: str
    work: Callable[[], Any]
    then: Callable[[Any], Event | None] = lambda _: None
    slot: Hashable | None = None
    subject: object = None
    is_repeated: bool = False
    is_kept: bool = False
    can_wait: bool = False


class StorageWorker:
    """Runs the jobs of one member.

    Args:
        note: Receives a message when a job fails, is slow or hangs, from any thread.
        start: Starts work under a name without waiting, or raises RuntimeError. A simulator with a
            single thread runs the work immediately.
        clock: A monotonic clock.
        wake: Called in the storage thread when a job ends that partitions wait for.
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
        self._hang_timeout_s = _HANG_TIMEOUT_S
        self._generation = 0
        self._hung: set[int] = set()
        self._has_no_thread = False
        self._passed_over = 0
        self._repeat_at = float("-inf")
        self._successes = 0
        self._tries: tuple[Job | None, int, int] = (None, 0, 0)
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
            if job.is_kept:
                kept = [slot for slot, one in self._waiting.items() if one.is_kept]
                for slot in kept[:-_MAX_KEPT]:
                    del self._waiting[slot]
        self._begin()

    def cancel(self, slot: Hashable) -> None:
        """Drop the waiting job of a slot. A running job is not affected."""
        with self._changed:
            self._waiting.pop(slot, None)

    def answers(self) -> Iterator[Callable[[], Event | None]]:
        """Yield the answers, oldest first. The member calls each in its thread; a call may raise.

        Handle each answer before you take the next; do not collect them in a list. The handler may
        take answers itself, and a newer answer must not be handled before an older one.
        """
        while not self._answers.empty():
            yield self._answers.get()

    def replace_hung_thread(self) -> None:
        """Continue in a new thread if the running job has hung for too long. Call this often."""
        with self._changed:
            job, hung_s = self._running, self._clock() - self._began_at
            if hung_s < self._hang_timeout_s or len(self._hung) >= _MAX_HUNG:
                job = None
            if job is not None:
                self._hang_timeout_s = min(2 * self._hang_timeout_s, _MAX_HANG_TIMEOUT_S)
                self._hung.add(self._generation)
                self._generation += 1
                self._running, self._is_busy = None, False
                self._keep(job, self._generation)
        if job is not None:
            self._note(
                f"{job.what}: no answer from Dagster's storage for {hung_s:.0f} s; its requests "
                "continue on a new connection"
            )
        self._begin()

    @property
    def silence(self) -> str | None:
        """A message if Dagster's storage has not answered for at least 10 s, or None."""
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
            self._repeat_at = float("-inf")
        self._begin()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy, timeout_s)
            self._waiting.clear()
            self._is_busy = False
            self._generation += 1

    def _begin(self) -> None:
        """Start a thread if a job can run and none does."""
        with self._changed:
            if self._is_busy or next(self._ready(), None) is None:
                return
            self._is_busy, generation = True, self._generation
        try:
            self._start("storage", partial(self._work, generation, threading.get_ident()))
        except RuntimeError as error:
            with self._changed:
                self._is_busy = False
            if not self._has_no_thread:
                self._note(f"no thread could be started for Dagster's storage: {error}")
            self._has_no_thread = True
        else:
            self._has_no_thread = False

    def _work(self, generation: int, member_thread_id: int) -> None:
        """Run jobs until none is ready, or a new thread has taken over."""
        while True:
            with self._changed:
                if generation != self._generation:
                    return
                slot = self._next_slot()
                if slot is None:
                    self._is_busy = False
                    self._changed.notify_all()
                    return
                job = self._running = self._waiting.pop(slot)
                self._began_at = self._clock()
                self._silent_since = (
                    self._began_at if self._silent_since is None else self._silent_since
                )
            answer = self._run(job, generation)
            with self._changed:
                if generation != self._generation:
                    self._hung.discard(generation)
                    return
                took_s = self._clock() - self._began_at
                self._running = self._silent_since = None
                self._hang_timeout_s = _HANG_TIMEOUT_S
                if answer is not None:
                    self._successes += 1
                    self._answers.put(answer)
            # The thread of the member needs no wake-up.
            if (
                answer is not None
                and not job.can_wait
                and threading.get_ident() != member_thread_id
            ):
                self._wake()
            if took_s > _SLOW_S:
                self._note(f"{job.what} took {took_s:.1f} s")

    def _ready(self) -> Iterator[Hashable]:
        """Return the slots of jobs that may run now, oldest first."""
        may_repeat = self._clock() >= self._repeat_at
        return (slot for slot, job in self._waiting.items() if may_repeat or not job.is_kept)

    def _next_slot(self) -> Hashable | None:
        oldest = next(self._ready(), None)
        urgent = next((slot for slot in self._ready() if not self._waiting[slot].can_wait), oldest)
        self._passed_over = 0 if urgent == oldest else self._passed_over + 1
        if self._passed_over <= _MAX_PASSED_OVER:
            return urgent
        self._passed_over = 0
        return oldest

    def _run(self, job: Job, generation: int) -> Callable[[], Event | None] | None:
        try:
            return partial(job.then, job.work())
        except (ConfigurationError, IllegalStateError) as error:
            return partial(_raise, error)
        except Exception as error:
            is_retried = self._keep(job, generation) or job.is_repeated
            consequence = " and is retried" if is_retried else ""
            self._note(f"{job.what} failed{consequence}: {error}")
            logger.warning("%s failed%s", job.what, consequence, exc_info=True)
            return None

    def _keep(self, job: Job, generation: int) -> bool:
        """Queue a kept job again, before all others. Return whether it will be repeated."""
        with self._changed:
            if not job.is_kept or generation != self._generation:
                return False
            last, tries, successes = self._tries
            tries = tries + (successes != self._successes) if last is job else 1
            self._tries = (job, tries, self._successes)
            if tries < _MAX_TRIES:
                self._waiting = {object(): job, **self._waiting}
                self._repeat_at = self._clock() + _REPEAT_AFTER_S
            return tries < _MAX_TRIES


def _raise(error: Exception) -> NoReturn:
    raise error
