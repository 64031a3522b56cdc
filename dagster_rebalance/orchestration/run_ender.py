"""Ends runs while their member goes on.

Owns that ending a run keeps nobody waiting: Dagster asks the process that launched it, and one that is suspended answers after a minute or
never. In that time a member would not poll Kafka, and would hear neither of its own partitions nor of a revoke.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dagster_rebalance.orchestration.runs import RunLedger

_log = logging.getLogger("dagster_rebalance")
_Task: TypeAlias = "tuple[str, str, str]"
"""What is done, to which run, and the last sign of life of one that is to be ended as dead."""
MOST_AT_ONCE = 4
"""Each writes to Dagster's storage, as the member does meanwhile."""


def in_thread(name: str, work: Callable[[], None]) -> None:
    """Start work in a daemon thread."""
    try:
        threading.Thread(target=work, name=f"dagster_rebalance {name}", daemon=True).start()
    except RuntimeError:  # this process is about to end, and lets no thread begin any more
        work()


def at_once(_name: str, work: Callable[[], None]) -> None:
    """Do work here and now, for a simulator with a single thread."""
    work()


class RunEnder:
    """Ends the runs of one member, a few at once: a launcher that takes a minute for one keeps the others waiting no longer.

    Args:
        ledger: Ends a run, and waits for it.
        note: Gets a sentence when that failed. It is called from any thread.
        ended: Gets the id of a dead run that was ended. It is called from any thread.
        start: Starts work, with a name for people. It should not wait.
    """

    def __init__(
        self,
        ledger: RunLedger,
        note: Callable[[str], None],
        ended: Callable[[str], None],
        start: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self._ledger = ledger
        self._note = note
        self._ended = ended
        self._start = start
        self._lock = threading.Lock()
        self._waiting: dict[_Task, None] = {}
        self._under_way: set[_Task] = set()
        self._workers = 0

    def cancel(self, run_ids: Iterable[str]) -> None:
        """Begin to cancel runs."""
        self._begin(("cancelling", run_id, "") for run_id in run_ids)

    def end_dead(self, signs: Mapping[str, str]) -> None:
        """Begin to end runs whose process has gone; each comes with its last sign of life."""
        self._begin(("ending", run_id, sign) for run_id, sign in signs.items())

    def _begin(self, tasks: Iterable[_Task]) -> None:
        with self._lock:
            self._waiting.update((task, None) for task in tasks if task not in self._under_way)
            wanted = min(MOST_AT_ONCE - self._workers, len(self._waiting))
            self._workers += max(0, wanted)
        for _ in range(wanted):
            self._start("ending runs", self._work)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            self._carry_out(task)

    def _next(self) -> _Task | None:
        with self._lock:
            task = next(iter(self._waiting), None)
            if task is None:
                self._workers -= 1
            else:
                del self._waiting[task]
                self._under_way.add(task)
            return task

    def _carry_out(self, task: _Task) -> None:
        what, run_id, sign = task
        try:
            if what == "cancelling":
                self._ledger.cancel(run_id)
            elif self._ledger.end_dead(run_id, sign):
                self._ended(run_id)
            else:
                self._note(f"run {run_id} is not dead: it has given a sign of life meanwhile")
        except Exception as error:  # noqa: BLE001 - whatever Dagster raises: the core asks again for as long as the run is live
            self._note(f"{what} run {run_id} failed: {error}")
            _log.warning("%s run %s failed", what, run_id, exc_info=True)
        finally:
            with self._lock:
                self._under_way.discard(task)
