"""Ends runs while their member goes on.

Owns that ending a run keeps nobody waiting: Dagster asks the process that launched it, and one that
is suspended answers after a minute or never. In that time a member would not poll Kafka, and would
hear neither of its own partitions nor of a revoke. A thread that hangs is overtaken after a while
by a new one.
"""

from __future__ import annotations

import itertools
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.core.runs.failed_attempt import error_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dagster_rebalance.orchestration.ports import RunsToEnd

logger = logging.getLogger(__name__)
_Task: TypeAlias = "tuple[str, str, str]"
"""What is done, to which run, and the last sign of life of one that is to be ended as dead."""
MOST_AT_ONCE = 4
"""Each writes to Dagster's storage, as the member does meanwhile."""
SLOW_S = 5.0
"""What takes longer waits for a launcher, and does not count as one of those."""
_MOST_SLOW = 12
PATIENCE_S = 120.0
_LONGEST_PATIENCE_S = 1920.0
"""It doubles each time that the same run hangs, so that a launcher that stays silent for a day
holds few threads."""
MOST_OVERTAKEN = 48
"""So many threads may hang beside those at work; another one that hangs keeps its place."""


def in_thread(name: str, work: Callable[[], None]) -> None:
    """Start work in a daemon thread."""
    try:
        threading.Thread(target=work, name=f"dagster_rebalance {name}", daemon=True).start()
    except RuntimeError:  # this process is about to end, and lets no thread begin any more
        work()


def at_once(_name: str, work: Callable[[], None]) -> None:
    """Do work here and now, for a simulator with a single thread."""
    work()


class RunCanceller:
    """The run ender ends the runs of one member, a few at once.

    A launcher that takes a minute for one run does not keep the others waiting.

    Args:
        runs: End a run, and wait for it.
        note: Gets a sentence when that failed. It is called from any thread.
        ended: Gets the id of a dead run that was ended. It is called from any thread.
        start: Starts work, with a name for people. It should not wait.
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
        self._overtaken: set[int] = set()
        self._lock = threading.Lock()
        self._waiting: dict[_Task, None] = {}
        self._at_work: dict[int, tuple[_Task | None, float]] = {}
        self._numbers = itertools.count()

    def cancel(self, run_ids: Iterable[str], *, only_unstarted: bool = False) -> None:
        """Begin to cancel runs; or those of them that have not started when it comes to them."""
        self._begin(
            ("taking back" if only_unstarted else "cancelling", run_id, "") for run_id in run_ids
        )

    def end_dead(self, signs: Mapping[str, str]) -> None:
        """Begin to end runs whose process has gone; each comes with its last sign of life."""
        self._begin(("ending", run_id, sign) for run_id, sign in signs.items())

    def _begin(self, tasks: Iterable[_Task]) -> None:
        now = self._clock()
        with self._lock:
            hung = self._overtake(now)
            under_way = {task for task, _ in self._at_work.values()}
            self._waiting.update((task, None) for task in tasks if task not in under_way)
            slow = sum(now - since >= SLOW_S for _, since in self._at_work.values())
            wanted = min(
                MOST_AT_ONCE + min(slow, _MOST_SLOW) - len(self._at_work), len(self._waiting)
            )
            begun = [next(self._numbers) for _ in range(wanted)]
            self._at_work |= dict.fromkeys(begun, (None, now))
        for what, run_id, _ in hung:
            self._note(
                f"{what} run {run_id} hangs: nobody has answered. It is tried again in another "
                "thread"
            )
        for number in begun:
            self._start("ending runs", partial(self._work, number))

    def _overtake(self, now: float) -> list[_Task]:
        """Replace the threads that have hung for too long.

        Return their tasks, which other threads may begin again.
        """
        hung = []
        for number, (task, since) in list(self._at_work.items()):
            patience_s = self._patience_s.get(task, PATIENCE_S) if task else float("inf")
            if task and now - since >= patience_s and len(self._overtaken) < MOST_OVERTAKEN:
                del self._at_work[number]
                self._overtaken.add(number)
                self._patience_s[task] = min(2 * patience_s, _LONGEST_PATIENCE_S)
                hung.append(task)
        return hung

    def _work(self, number: int) -> None:
        while (task := self._next(number)) is not None:
            self._carry_out(task)

    def _next(self, number: int) -> _Task | None:
        with self._lock:
            if number not in self._at_work:
                self._overtaken.discard(number)
                return None
            done, _ = self._at_work[number]
            if done is not None:
                self._patience_s.pop(done, None)
            task = next(iter(self._waiting), None)
            if task is None:
                del self._at_work[number]
            else:
                del self._waiting[task]
                self._at_work[number] = (task, self._clock())
            return task

    def _carry_out(self, task: _Task) -> None:
        what, run_id, sign = task
        try:
            if what != "ending":
                self._runs.cancel(run_id, only_unstarted=what == "taking back")
            elif self._runs.end_dead(run_id, sign):
                self._ended(run_id)
            else:
                self._note(f"run {run_id} is not dead: it has given a sign of life meanwhile")
        except Exception as error:
            self._note(f"{what} run {run_id} failed: {error_text(str(error))}")
            logger.warning("%s run %s failed", what, run_id, exc_info=True)
