"""Whose turn it is: one caller at a time, nobody from inside its own call, and nobody after the end.

Owns the refusal. Must never wait: a second caller is told at once what is wrong.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dagster_rebalance.core.errors import IllegalStateError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class Turn:
    """The one turn that a consumer has to give.

    Example:
        ```python
        with turn.of("poll"):
            ...
        ```
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0
        self.is_over = False
        """Whether there is no turn any more; to be set by the one who has it."""

    def of(self, call: str) -> Self:
        """Take the turn for a call, and give it back at the end of the `with`.

        Raises:
            IllegalStateError: It is taken, by another thread or by the caller itself, inside a callback; or there is none any more.
        """
        if not self._lock.acquire(blocking=False):
            nested = self._holder == threading.get_ident()
            inside = "inside a rebalance callback: return from it first"
            beside = "while another thread uses the consumer: give it one owner"
            msg = f"{call} {inside if nested else beside}"
            raise IllegalStateError(msg)
        if self.is_over:
            self._lock.release()
            msg = f"{call} on a closed consumer: make a new one"
            raise IllegalStateError(msg)
        self._holder = threading.get_ident()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()
