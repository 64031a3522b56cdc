"""Whose turn it is: one thread at a time, no poll inside of a poll, and nobody after the end.

A process that was forked has no turn at all: the threads behind the consumer are not in it.

Owns the refusal, and its reason. Must never wait: a second caller is told at once what is wrong.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from dagster_rebalance.core.model.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

    from typing_extensions import Self

    class HasTurn(Protocol):
        """Whose calls take turns."""

        @property
        def _turn(self) -> CallGuard: ...


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound="HasTurn")

_THE_TURN = "turn"


class _Held(NamedTuple):
    call: str
    thread: int
    frame: FrameType | None

    @property
    def is_live(self) -> bool:
        """Whether the call that took the turn is still on the stack of the thread that asks."""
        frame = inspect.currentframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


class CallGuard:
    """The one turn that a consumer has to give.

    Example:
        ```python
        with turn.of("poll"):
            with turn.within("commit_sync"): ...  # a callback of that poll
        ```
    """

    def __init__(self) -> None:
        # At most one entry. `setdefault` is atomic, so no lock is held when a signal handler
        # raises.
        self._held: dict[str, _Held] = {}
        self.in_callback = False
        """Whether the one who has the turn is running a callback; to be set by it."""
        self.is_over = False
        """Whether there is no turn any more; to be set by the one who has it."""
        self._process = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the consumer was made by another process, of which this one is a fork."""
        return os.getpid() != self._process

    def of(self, call: str) -> AbstractContextManager[object]:
        """Take the turn for a call, and give it back at the end of the `with`.

        Raises:
            IllegalStateError: It is taken, by another thread or by an outer call of the same; or
                there is none any more, or none in this process.
        """
        self._refuse_elsewhere(call)
        outer = self._outer_call()
        if outer is not None:
            inside = (
                "inside a rebalance callback: return from it first"
                if self.in_callback
                else f"in a signal handler or callback that interrupts {outer}: "
                f"call wakeup() there, and {call} once it has returned"
            )
            msg = f"{call} {inside}"
            raise IllegalStateError(msg)
        return self._take(call, _caller())

    def within(self, call: str) -> AbstractContextManager[object]:
        """Take the turn like `of`, or share it with an outer call of the same thread.

        Raises:
            IllegalStateError: Another thread has it, or there is none any more, or none in this
                process.
        """
        self._refuse_elsewhere(call)
        if self._outer_call() is not None:
            return nullcontext()
        return self._take(call, _caller())

    def _refuse_elsewhere(self, call: str) -> None:
        if self.is_elsewhere:
            msg = (
                f"{call} on a consumer that another process has made: its threads are not in this "
                "one, which was forked; make a consumer here"
            )
            raise IllegalStateError(msg)

    def _outer_call(self) -> str | None:
        """The call of this thread that has the turn.

        A signal handler may raise between any two steps, so a call can end without giving its turn
        back.
        """
        held = self._held.get(_THE_TURN)
        if held is None or held.thread != threading.get_ident():
            return None
        if held.is_live:
            return held.call
        self._held.pop(_THE_TURN, None)
        return None

    def _take(self, call: str, frame: FrameType | None) -> Self:
        mine = _Held(call, threading.get_ident(), frame)
        held = self._held.setdefault(_THE_TURN, mine)
        if held is not mine:
            msg = (
                f"{call} while another thread is in {held.call}: one thread at a time may use a "
                "consumer; "
                "give it one owner, and let others only call wakeup()"
            )
            raise IllegalStateError(msg)
        self.in_callback = False
        if self.is_over:
            self._held.pop(_THE_TURN, None)
            msg = f"{call} on a closed consumer: make a new one"
            raise IllegalStateError(msg)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.pop(_THE_TURN, None)


def _caller() -> FrameType | None:
    """The call that takes the turn: who called the function that asks."""
    frame = inspect.currentframe()
    try:
        asking = frame.f_back if frame else None
        return asking.f_back if asking else None
    finally:
        # A frame that refers to itself keeps its callers, with the records of their polls, until
        # Python looks for cycles.
        del frame


def in_turn(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """An operation that is refused while another thread uses the consumer, and after its end."""
    call = method.__name__

    @functools.wraps(method)
    def taking_the_turn(self: C, *arguments: P.args, **named: P.kwargs) -> R:
        with self._turn.within(call):
            return method(self, *arguments, **named)

    return cast("Callable[Concatenate[C, P], R]", taking_the_turn)
