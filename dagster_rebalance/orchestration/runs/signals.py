"""Notes that the process of a run was asked to end by a signal.

While an asset waits for somebody else's work, the code that waits hears of it by an exception, and
may keep that to itself: the client of dagster-databricks cancels its job and returns as if the job
had succeeded. The run must not. In all other cases Dagster ends the step with its exception, and
the log of the run says so.
"""

from __future__ import annotations

import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import dagster as dg

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Dagster raises its exception for these."""
_INTERRUPTED = dg.DagsterExecutionInterruptedError.__name__


def has_ended_a_step(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether a step of a run has ended because its process was asked to end.

    Dagster says the same when a person has cancelled the run: the status of the run tells them
    apart.
    """
    entries = instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    errors = [e.dagster_event.step_failure_data.error for e in entries if e.dagster_event]
    return any(error is not None and error.cls_name == _INTERRUPTED for error in errors)


class Interruptions:
    """The signals that reach one run from `watch` on, until its step ends."""

    def __init__(self) -> None:
        self._is_asked_to_end = False

    def watch(self) -> None:
        """Note what reaches this step, and hand it on as before.

        Dagster sets its own handlers again when the step ends. Only the main thread hears signals.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler: Any = signal.getsignal(number)
            is_noted = isinstance(handler, partial) and handler.func == self._note
            if callable(handler) and not is_noted:
                signal.signal(number, partial(self._note, handler))

    def check(self, run_id: str) -> None:
        """Make sure that nothing was heard.

        Raises:
            DagsterExecutionInterruptedError: The run was asked to end, so what it has done may be a
                part only.
        """
        if self._is_asked_to_end:
            msg = (
                f"run {run_id} was asked to end while its asset waited for external work, which "
                "may have been cancelled: its output does not count"
            )
            raise dg.DagsterExecutionInterruptedError(msg)

    def _note(
        self, handler: Callable[[int, FrameType | None], None], number: int, frame: FrameType | None
    ) -> None:
        self._is_asked_to_end = True
        handler(number, frame)
