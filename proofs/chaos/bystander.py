"""The bystander asks Dagster's storage what members ask, and notes when an answer took long.

Its questions are those that members ask between two batches. Owns the delays that are the machine's
fault. A busy processor or a busy storage that keeps the idle bystander waiting keeps a member
waiting as well, and is no stall of the member.
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
"""On a machine that has time the answer takes a few hundredths of a second."""
_PAUSE_S = 0.25
_LONGEST_LOCK_S = 120.0
SQLITE_FILES = ("history/runs.db", "history/runs/index.db", "schedules/schedules.db")
"""The databases in the home folder of a Dagster instance without a server of its own."""


def wait_for_writes(home: Path) -> None:
    """Wait until SQLite lets somebody write.

    A process that is frozen in the middle of a write keeps all others waiting.
    """
    for name in SQLITE_FILES:
        with closing(
            sqlite3.connect(home / name, timeout=_LONGEST_LOCK_S, isolation_level=None)
        ) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")


class Bystander:
    """Asks four times a second, in a thread of its own, from when it is entered.

    Args:
        ask: Asks once. What it raises says nothing about time, and is left to the faults.
        clock: Seconds since 1970.
    """

    def __init__(self, ask: Callable[[], object], clock: Callable[[], float] = time.time) -> None:
        self._ask = ask
        self._clock = clock
        self._slow: list[Span] = []
        self._is_over = threading.Event()

    @property
    def slow(self) -> list[Span]:
        """When it waited longer than `SLOW_S` for an answer, oldest first."""
        return list(self._slow)

    def look(self) -> None:
        """Ask once."""
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
