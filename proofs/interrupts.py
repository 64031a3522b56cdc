"""Ctrl-C: one is enough, it ends everything in order, and nothing that is being ended is disturbed.

Owns the signal handlers of a command that starts other programs.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Turns the signals that ask a program to end into KeyboardInterrupt, now or a little later."""

    def __init__(self) -> None:
        self._is_deferred = False
        self._is_pending = False
        self._is_over = False

    def install(self) -> None:
        """Take the signals from now on, even if a shell started the program with SIGINT ignored."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def end(self) -> None:
        """Ignore further signals: what is being ended gets ended."""
        self._is_over = True

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let a short call come to its end first."""
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
