"""The heartbeat of a run: its process says from time to time, in a tag of the run, that it lives.

The member that waits for the run watches the tag change. A run that was taken for dead (its process was suspended, say) must not go on
working when it comes back: its batch has been requested again. So the heartbeat also looks whether Dagster still shows the run as
working, and interrupts the process if not.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.orchestration.tags import HEARTBEAT_TAG

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_log = logging.getLogger(__name__)
_WORKING = {dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING}


class Heartbeat:
    """Beats in a thread of its own while a run works.

    Args:
        instance: The instance that the run belongs to; the thread opens it anew.
        run_id: The run.
        interval_s: Seconds between two beats.
    """

    def __init__(self, instance: dg.DagsterInstance, run_id: str, *, interval_s: float = 10.0) -> None:
        self._instance_ref = instance.get_ref()
        self._run_id = run_id
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat of {run_id}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        with dg.DagsterInstance.from_ref(self._instance_ref) as instance:
            while True:  # the first beat comes also when the work is over at once
                try:
                    run = instance.get_run_by_id(self._run_id)
                    if run is not None and run.status not in _WORKING:
                        self._interrupt(run.status)
                        return
                    instance.add_run_tags(self._run_id, {HEARTBEAT_TAG: f"{time.time():.0f}"})
                except Exception:  # noqa: BLE001 - the database may be away for a moment; the next beat tries again
                    _log.warning("run %s could not give a sign of life", self._run_id, exc_info=True)
                if self._stopped.wait(self._interval_s):
                    return

    def _interrupt(self, status: dg.DagsterRunStatus) -> None:
        if not self._stopped.is_set():
            _log.error("run %s is %s in Dagster but its process works: it was taken for dead and stops now", self._run_id, status.value)
            os.kill(os.getpid(), signal.SIGTERM)
