"""Refuse calls of a consumer by a second thread, inside a poll, after `close` and in a fork.

A refused call never waits: it raises an error with the reason.
"""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.errors import IllegalStateError

if TYPE_CHECKING:
    from types import FrameType

    from typing_extensions import Self

_KEY = "call"


class _RunningCall(NamedTuple):
    name: str
    thread: int
    frame: FrameType | None

    @property
    def is_live(self) -> bool:
        """Whether the call is still on the stack of the current thread."""
        frame = inspect.currentframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


_GUARDS: weakref.WeakSet[CallGuard] = weakref.WeakSet()


class CallGuard:
    """Admits one thread at a time to a consumer, as Kafka's own consumer does."""

    def __init__(self) -> None:
        # At most one entry. `setdefault` is atomic, so no lock is held when a signal handler
        # raises.
        self._running: dict[str, _RunningCall] = {}
        self.in_callback = False
        """Whether the running call is in a callback; set by that call."""
        self.is_closed = False
        """Whether all further calls are refused; set by the running call."""
        self.is_forked = False
        """Whether this process is a fork of the process that created the consumer."""
        _GUARDS.add(self)

    @property
    def is_free(self) -> bool:
        """Whether `exclusive` would admit a call."""
        return not (self._running or self.is_closed or self.is_forked)

    def exclusive(self, call: str) -> AbstractContextManager[object]:
        """Admit a call that must not run inside another one."""
        self._refuse_fork(call)
        outer = self._outer_call()
        if outer is not None:
            inside = (
                "inside a rebalance callback: return from the callback first"
                if self.in_callback
                else f"in a signal handler or callback that interrupts {outer}: "
                f"call wakeup() there, and {call} once it has returned"
            )
            msg = f"{call} {inside}"
            raise IllegalStateError(msg)
        return self._enter(call, _caller())

    def reentrant(self, call: str) -> AbstractContextManager[object]:
        """Admit a call, also inside a running call of the same thread."""
        self._refuse_fork(call)
        if self._outer_call() is not None:
            return nullcontext()
        return self._enter(call, _caller())

    def _refuse_fork(self, call: str) -> None:
        if self.is_forked:
            msg = (
                f"{call} on a consumer of another process: this process is a fork without its "
                "threads; create a consumer here"
            )
            raise IllegalStateError(msg)

    def _outer_call(self) -> str | None:
        """Return the running call of this thread, or None.

        A signal handler may raise between any two steps, so an ended call can still be registered.
        """
        running = self._running.get(_KEY)
        if running is None or running.thread != threading.get_ident():
            return None
        if running.is_live:
            return running.name
        self._running.pop(_KEY, None)
        return None

    def _enter(self, call: str, frame: FrameType | None) -> Self:
        entered = _RunningCall(call, threading.get_ident(), frame)
        running = self._running.setdefault(_KEY, entered)
        if running is not entered:
            msg = (
                f"{call} while another thread is in {running.name}: one thread at a time may use "
                "a consumer; give it one owner, and let others only call wakeup()"
            )
            raise IllegalStateError(msg)
        self.in_callback = False
        if self.is_closed:
            self._running.pop(_KEY, None)
            msg = f"{call} on a closed consumer: create a new one"
            raise IllegalStateError(msg)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.pop(_KEY, None)


def _caller() -> FrameType | None:
    """Return the frame that called the caller of this function."""
    frame = inspect.currentframe()
    try:
        entering = frame.f_back if frame else None
        return entering.f_back if entering else None
    finally:
        # A frame that references itself keeps its callers, with the records of their polls, until
        # Python collects cycles.
        del frame


def _mark_forked() -> None:
    for guard in _GUARDS:
        guard.is_forked = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_mark_forked)
