"""Whose turn it is: one caller at a time, and nobody from inside its own call.

Owns the refusal. Must never wait: a second caller is told at once what is wrong.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dagster_rebalance.core.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Turn:
    """The one turn that a consumer has to give."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0

    @contextmanager
    def of(self, call: str) -> Iterator[None]:
        """Take the turn for a call.

        Raises:
            IllegalStateError: It is taken, by another thread or by the caller itself, inside a callback.
        """
        if not self._lock.acquire(blocking=False):
            nested = self._holder == threading.get_ident()
            inside = "inside a rebalance callback: return from it first"
            beside = "while another thread uses the consumer: give it one owner"
            msg = f"{call} {inside if nested else beside}"
            raise IllegalStateError(msg)
        try:
            self._holder = threading.get_ident()
            yield
        finally:
            self._lock.release()
