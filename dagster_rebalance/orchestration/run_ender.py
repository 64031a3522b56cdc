"""Ends runs while their member goes on.

Owns that ending a run keeps nobody waiting: Dagster asks the process that launched it, and one that is suspended answers after a minute or
never. In that time a member would not poll Kafka, and would hear neither of its own partitions nor of a revoke.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.orchestration.runs import RunLedger

_log = logging.getLogger("dagster_rebalance")


class RunEnder:
    """Ends the runs of one member, each in a thread of its own.

    Args:
        ledger: Ends a run, and waits for it.
        note: Gets a sentence when that failed. It is called from any thread.
    """

    def __init__(self, ledger: RunLedger, note: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._note = note
        self._under_way: dict[tuple[str, str], threading.Thread] = {}

    def cancel(self, run_ids: Iterable[str]) -> None:
        """Begin to cancel runs. Does not wait."""
        for run_id in run_ids:
            self._begin(run_id, "cancelling", self._ledger.cancel)

    def end_dead(self, run_ids: Iterable[str]) -> None:
        """Begin to end runs whose process has gone. Does not wait."""
        for run_id in run_ids:
            self._begin(run_id, "ending", self._ledger.end_dead)

    def _begin(self, run_id: str, what: str, end: Callable[[list[str]], None]) -> None:
        self._under_way = {key: thread for key, thread in self._under_way.items() if thread.is_alive()}
        if (run_id, what) in self._under_way:
            return
        thread = threading.Thread(target=self._end, args=(run_id, what, end), name=f"dagster_rebalance {what} {run_id}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # this process is about to end, and lets no thread begin any more
            self._end(run_id, what, end)
        else:
            self._under_way[run_id, what] = thread

    def _end(self, run_id: str, what: str, end: Callable[[list[str]], None]) -> None:
        try:
            end([run_id])
        except Exception as error:  # noqa: BLE001 - whatever Dagster raises: the core asks again for as long as the run is live
            self._note(f"{what} run {run_id} failed: {error}")
            _log.warning("%s run %s failed", what, run_id, exc_info=True)
