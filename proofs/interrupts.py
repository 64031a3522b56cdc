"""Signal handling of commands that start other programs: one Ctrl-C ends them in order."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Converts SIGINT, SIGTERM and SIGHUP to KeyboardInterrupt, immediately or deferred."""

    def __init__(self) -> None:
        self._is_deferred = False
        self._is_pending = False
        self._is_over = False

    def install(self) -> None:
        """Install the handlers, even if a shell started the program with SIGINT ignored."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def end(self) -> None:
        """Ignore further signals during the shutdown."""
        self._is_over = True

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals until a short call has returned."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self._is_pending:
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_over:
            return
        if self._is_deferred:
            self._is_pending = True
            return
        raise KeyboardInterrupt
