"""Ends runs while their member goes on.

Owns that ending a run keeps nobody waiting: Dagster asks the process that launched it, and one that is suspended answers after a minute or
never. In that time a member would not poll Kafka, and would hear neither of its own partitions nor of a revoke.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.orchestration.runs import RunLedger

_log = logging.getLogger("dagster_rebalance")


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
    """Ends the runs of one member.

    Args:
        ledger: Ends a run, and waits for it.
        note: Gets a sentence when that failed. It is called from any thread.
        start: Starts work, with a name for people. It should not wait.
    """

    def __init__(self, ledger: RunLedger, note: Callable[[str], None], start: Callable[[str, Callable[[], None]], None]) -> None:
        self._ledger = ledger
        self._note = note
        self._start = start
        self._under_way: set[tuple[str, str]] = set()

    def cancel(self, run_ids: Iterable[str]) -> None:
        """Begin to cancel runs, one after the other: each of them writes to Dagster's storage, as the member does meanwhile."""
        self._begin("cancelling", run_ids, self._ledger.cancel)

    def end_dead(self, run_ids: Iterable[str]) -> None:
        """Begin to end runs whose process has gone, one after the other."""
        self._begin("ending", run_ids, self._ledger.end_dead)

    def _begin(self, what: str, run_ids: Iterable[str], end: Callable[[str], None]) -> None:
        fresh = [run_id for run_id in run_ids if (what, run_id) not in self._under_way]
        if fresh:
            self._under_way.update((what, run_id) for run_id in fresh)
            self._start(f"{what} {', '.join(fresh)}", partial(self._end_all, what, fresh, end))

    def _end_all(self, what: str, run_ids: list[str], end: Callable[[str], None]) -> None:
        for run_id in run_ids:
            self._end(what, run_id, end)

    def _end(self, what: str, run_id: str, end: Callable[[str], None]) -> None:
        try:
            end(run_id)
        except Exception as error:  # noqa: BLE001 - whatever Dagster raises: the core asks again for as long as the run is live
            self._note(f"{what} run {run_id} failed: {error}")
            _log.warning("%s run %s failed", what, run_id, exc_info=True)
        finally:
            self._under_way.discard((what, run_id))
