"""How members learn at once that their code server is told to end.

After a SIGTERM Dagster's code server lives on until the runs that it launched are over. Meanwhile
it goes on answering ticks, but refuses to launch runs: each batch that a member offers by then is a
failed run, and three of those stop a partition. `atexit`, and with it the end of the members, comes
after all that (seen with Dagster 1.13.27). So the signal itself is watched. Handlers can only be
set by the main thread, while members are made in ticks, which run in other threads: the main thread
is asked to set them.

Only adds to the handlers that it finds, and never sets one where the system's own would end the
process.
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
"""What the main thread was asked to call. It must not be collected before it is called, and there
is one for each process."""


def call_on_shutdown(action: Callable[[], None]) -> None:
    """Call `action` in the main thread when this process gets a signal to end.

    The call comes before the handlers that the process has already.
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
            "the end of this process cannot be watched: its members leave only when all runs of "
            "the code server are over"
        )


def _add(number: signal.Signals, action: Callable[[], None]) -> None:
    before = signal.getsignal(number)
    if not callable(before):
        return

    def handle(signal_number: int, frame: FrameType | None) -> None:
        action()
        before(signal_number, frame)

    signal.signal(number, handle)
