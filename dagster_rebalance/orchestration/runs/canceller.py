"""Cancel and end runs in threads: the member loop must never wait for a launcher.

Dagster sends the request to the process that launched the run. A suspended process answers after a
minute or never, and the member could not poll Kafka in that time. If a thread hangs for too long, a
new thread replaces it.
"""

from __future__ import annotations

import itertools
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.runs.retry import error_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dagster_rebalance.orchestration.ports import RunsToEnd

logger = logging.getLogger(__name__)
_Task: TypeAlias = "tuple[str, str, str]"
"""The operation, the run, and the last heartbeat of a dead run."""
MAX_THREADS = 4
"""Each thread writes to Dagster's storage, as the member does."""
SLOW_S = 5.0
"""If a task takes longer, it waits for a launcher, and does not count towards `MAX_THREADS`."""
_MAX_SLOW = 12
PATIENCE_S = 120.0
_MAX_PATIENCE_S = 1920.0
"""The patience doubles each time that the same task hangs, so a launcher that is silent for a day
holds few threads."""
MAX_REPLACED = 48
"""The number of hanging threads that are replaced. Further hanging threads are not."""


def in_thread(name: str, work: Callable[[], None]) -> None:
    """Run a function in a daemon thread; at the exit of the process, in the calling thread.

    Raises:
        RuntimeError: The process may start no more threads.
    """
    try:
        threading.Thread(target=work, name=f"dagster_rebalance {name}", daemon=True).start()
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
        work()


def at_once(_name: str, work: Callable[[], None]) -> None:
    """Run a function in the calling thread, for tests and simulators."""
    work()


class RunCanceller:
    """Cancels and ends the runs of one member, a few at a time.

    Args:
        runs: Ends a run, and waits for its end.
        note: Receives a message about each failure, in any thread.
        ended: Receives the id of each dead run that was ended, in any thread.
        start: Runs a function without waiting, given a name of the thread. If it raises
            RuntimeError, the tasks wait for the next call.
        clock: A monotonic clock.
    """

    def __init__(
        self,
        runs: RunsToEnd,
        note: Callable[[str], None],
        ended: Callable[[str], None],
        start: Callable[[str, Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._runs = runs
        self._note = note
        self._ended = ended
        self._start = start
        self._clock = clock
        self._patience_s: dict[_Task, float] = {}
        self._replaced: set[int] = set()
        self._lock = threading.Lock()
        self._waiting: dict[_Task, None] = {}
        self._active: dict[int, tuple[_Task | None, float]] = {}
        self._numbers = itertools.count()

    def cancel(self, run_ids: Iterable[str], *, only_unstarted: bool = False) -> None:
        """Begin to cancel runs. If `only_unstarted`, skip runs that have started by then."""
        self._begin(
            ("taking back" if only_unstarted else "cancelling", run_id, "") for run_id in run_ids
        )

    def end_dead(self, heartbeats: Mapping[str, str]) -> None:
        """Begin to end dead runs, given the last heartbeat of each."""
        self._begin(("ending", run_id, heartbeat) for run_id, heartbeat in heartbeats.items())

    def _begin(self, tasks: Iterable[_Task]) -> None:
        now = self._clock()
        with self._lock:
            hung = self._replace_hung(now)
            active = {task for task, _ in self._active.values()}
            self._waiting.update((task, None) for task in tasks if task not in active)
            slow = sum(now - since >= SLOW_S for _, since in self._active.values())
            wanted = min(MAX_THREADS + min(slow, _MAX_SLOW) - len(self._active), len(self._waiting))
            begun = [next(self._numbers) for _ in range(wanted)]
            self._active |= dict.fromkeys(begun, (None, now))
        for operation, run_id, _ in hung:
            self._note(
                f"{operation} run {run_id} hangs without an answer. It is retried in another thread"
            )
        for number in begun:
            self._begin_thread(number)

    def _begin_thread(self, number: int) -> None:
        try:
            self._start("ending runs", partial(self._work, number))
        except RuntimeError as error:
            with self._lock:
                del self._active[number]
            self._note(f"no thread could be started to end runs: {error}")

    def _replace_hung(self, now: float) -> list[_Task]:
        """Drop the threads that hang for too long. Return their tasks, which may be repeated."""
        hung = []
        for number, (task, since) in list(self._active.items()):
            patience_s = self._patience_s.get(task, PATIENCE_S) if task else float("inf")
            if task and now - since >= patience_s and len(self._replaced) < MAX_REPLACED:
                del self._active[number]
                self._replaced.add(number)
                self._patience_s[task] = min(2 * patience_s, _MAX_PATIENCE_S)
                hung.append(task)
        return hung

    def _work(self, number: int) -> None:
        while (task := self._next(number)) is not None:
            self._carry_out(task)

    def _next(self, number: int) -> _Task | None:
        with self._lock:
            if number not in self._active:
                self._replaced.discard(number)
                return None
            done, _ = self._active[number]
            if done is not None:
                self._patience_s.pop(done, None)
            task = next(iter(self._waiting), None)
            if task is None:
                del self._active[number]
            else:
                del self._waiting[task]
                self._active[number] = (task, self._clock())
            return task

    def _carry_out(self, task: _Task) -> None:
        operation, run_id, heartbeat = task
        try:
            if operation != "ending":
                self._runs.cancel(run_id, only_unstarted=operation == "taking back")
            elif self._runs.end_dead(run_id, heartbeat):
                self._ended(run_id)
            else:
                self._note(f"run {run_id} is not dead: it has sent another heartbeat")
        except Exception as error:
            self._note(f"{operation} run {run_id} failed: {error_text(str(error))}")
            logger.warning("%s run %s failed", operation, run_id, exc_info=True)
