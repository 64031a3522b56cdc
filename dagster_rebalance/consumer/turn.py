"""Whose turn it is: one thread at a time, no poll inside of a poll, and nobody after the end.

Owns the refusal, and its reason. Must never wait: a second caller is told at once what is wrong.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar, cast

from dagster_rebalance.core.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    class HasTurn(Protocol):
        """Whose calls take turns."""

        @property
        def _turn(self) -> Turn: ...


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound="HasTurn")


class Turn:
    """The one turn that a consumer has to give.

    Example:
        ```python
        with turn.of("poll"):
            with turn.within("commit_sync"): ...  # a callback of that poll
        ```
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0
        self._depth = 0
        self._call = ""
        self.in_callback = False
        """Whether the one who has the turn is running a callback; to be set by it."""
        self.is_over = False
        """Whether there is no turn any more; to be set by the one who has it."""

    def of(self, call: str) -> Self:
        """Take the turn for a call, and give it back at the end of the `with`.

        Raises:
            IllegalStateError: It is taken, by another thread or by an outer call of the same; or there is none any more.
        """
        if self._holder == threading.get_ident():
            inside = (
                "inside a rebalance callback: return from it first"
                if self.in_callback
                else f"in a signal handler or callback that interrupts {self._call}: call wakeup() there, and {call} once it has returned"
            )
            msg = f"{call} {inside}"
            raise IllegalStateError(msg)
        return self._take(call)

    def within(self, call: str) -> Self:
        """Take the turn like `of`, or share it with an outer call of the same thread.

        Raises:
            IllegalStateError: Another thread has it, or there is none any more.
        """
        if self._holder == threading.get_ident():
            self._depth += 1
            return self
        return self._take(call)

    def _take(self, call: str) -> Self:
        if not self._lock.acquire(blocking=False):
            msg = (
                f"{call} while another thread is in {self._call or 'another call'}: one thread at a time may use a consumer; "
                "give it one owner, and let others only call wakeup()"
            )
            raise IllegalStateError(msg)
        if self.is_over:
            self._lock.release()
            msg = f"{call} on a closed consumer: make a new one"
            raise IllegalStateError(msg)
        self._call, self._depth = call, 1
        self._holder = threading.get_ident()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if not self._depth:
            # Before the release: the next holder is not to be taken for this one.
            self._holder = 0
            self._lock.release()


def in_turn(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """An operation that is refused while another thread uses the consumer, and after its end."""
    call = method.__name__

    @functools.wraps(method)
    def taking_the_turn(self: C, *arguments: P.args, **named: P.kwargs) -> R:
        with self._turn.within(call):
            return method(self, *arguments, **named)

    return cast("Callable[Concatenate[C, P], R]", taking_the_turn)
