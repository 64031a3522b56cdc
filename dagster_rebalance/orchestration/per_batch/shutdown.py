"""Handlers of the signals that end a code server, so that its members leave immediately.

After a SIGTERM, Dagster's code server lives until its runs have ended. It still answers ticks but
refuses to launch runs, so each batch that a member requests then is a failed run, and three of
those stop a partition. `atexit` comes after that (seen with Dagster 1.13.27). Only the main thread
may set handlers, while members are made in ticks in other threads, so the main thread is asked to.
Existing handlers are kept, and none is set where the system's default would end the process.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

logger = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PendingCall = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_pending: list[object] = []
"""The pending calls of the main thread, which must not be garbage-collected before."""


def call_on_shutdown(action: Callable[[], None]) -> None:
    """Call `action` in the main thread when this process receives a signal to end.

    The call precedes the existing handlers.
    """

    def install(_: object = None) -> int:
        for number in _SIGNALS:
            _add(number, action)
        return 0

    if threading.current_thread() is threading.main_thread():
        install()
        return
    call = _PendingCall(install)
    _pending.append(call)
    if ctypes.pythonapi.Py_AddPendingCall(call, None) != 0:
        logger.warning(
            "the shutdown of this process cannot be detected: its members leave only after all "
            "runs of the code server have ended"
        )


def _add(number: signal.Signals, action: Callable[[], None]) -> None:
    before = signal.getsignal(number)
    if not callable(before):
        return

    def handle(signal_number: int, frame: FrameType | None) -> None:
        action()
        before(signal_number, frame)

    signal.signal(number, handle)
