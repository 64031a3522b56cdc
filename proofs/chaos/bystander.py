"""The bystander queries Dagster's storage as a member does, and notes slow answers.

If a busy processor or storage delays the idle bystander, it delays members as well: such delays are
no stalls of a member.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

from proofs.chaos.spans import Span

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typing_extensions import Self

SLOW_S = 0.2
"""On an idle machine the answer takes a few hundredths of a second."""
_PAUSE_S = 0.25
_LONGEST_LOCK_S = 120.0
SQLITE_FILES = ("history/runs.db", "history/runs/index.db", "schedules/schedules.db")
"""The databases in the home folder of a Dagster instance with SQLite."""


def wait_for_writes(home: Path) -> None:
    """Wait until SQLite allows a write; a process suspended inside a write blocks all others."""
    for name in SQLITE_FILES:
        with closing(
            sqlite3.connect(home / name, timeout=_LONGEST_LOCK_S, isolation_level=None)
        ) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")


class Bystander:
    """Queries four times a second in a thread, while it is entered.

    Args:
        ask: Queries once. Its errors are ignored: faults cause them.
        clock: Seconds since 1970.
    """

    def __init__(self, ask: Callable[[], object], clock: Callable[[], float] = time.time) -> None:
        self._ask = ask
        self._clock = clock
        self._slow: list[Span] = []
        self._is_over = threading.Event()

    @property
    def slow(self) -> list[Span]:
        """The waits of more than `SLOW_S`, oldest first."""
        return list(self._slow)

    def look(self) -> None:
        began_at = self._clock()
        try:
            self._ask()
        except Exception:  # noqa: BLE001 - whatever Dagster's storage raises while it is locked
            return
        span = Span(began_at, self._clock())
        if span.seconds > SLOW_S:
            self._slow.append(span)

    def __enter__(self) -> Self:
        threading.Thread(target=self._main, name="bystander", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _main(self) -> None:
        while not self._is_over.wait(_PAUSE_S):
            self.look()
