"""Faults of Dagster's storage: blocked writes, or connections without answers.

The play uses the same storage, so a timer thread ends these faults.
"""

from __future__ import annotations

import sqlite3
import threading
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from proofs.chaos.bystander import SQLITE_FILES
from proofs.chaos.exchange import SESSION_TIMEOUT_S
from proofs.chaos.faults import Fault, Ground, Kind, UnderWay
from proofs.chaos.parts import DATABASE

if TYPE_CHECKING:
    from collections.abc import Callable

    from proofs.chaos.parts import Parts

_TABLES = ("runs", "run_tags", "event_logs", "asset_keys", "kvs", "jobs", "job_ticks")


def lock(ground: Ground) -> UnderWay | None:
    """Block all other writers, as a backup or a long transaction does."""
    if ground.suffers(Kind.STORAGE_LOCKED, Kind.STORAGE_HANGS):
        return None
    fault = Fault(Kind.STORAGE_LOCKED, "all databases")
    return _for_a_while(fault, _lock_of(ground.parts), ground.chance.uniform(2, 8))


def hang(ground: Ground) -> UnderWay | None:
    """Suspend the server: the kernel accepts connections, but there are no answers."""
    postgres = ground.parts.postgres
    if postgres is None or ground.suffers(Kind.STORAGE_LOCKED, Kind.STORAGE_HANGS):
        return None
    fault = Fault(Kind.STORAGE_HANGS, "Postgres")
    postgres.server.suspend()
    return _for_a_while(fault, postgres.server.resume, ground.chance.uniform(5, 30))


def _for_a_while(fault: Fault, end: Callable[[], None], seconds: float) -> UnderWay:
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return UnderWay(fault, lambda: not timer.is_alive())


def _lock_of(parts: Parts) -> Callable[[], None]:
    """Lock the storage, and return the function that unlocks it."""
    if parts.postgres is not None:
        return parts.postgres.lock_tables(DATABASE, _TABLES)
    is_over, is_locked = threading.Event(), threading.Event()

    def keep() -> None:
        with ExitStack() as stack:
            for name in SQLITE_FILES:
                path = parts.dagster.home / name
                connection = stack.enter_context(
                    closing(sqlite3.connect(path, timeout=SESSION_TIMEOUT_S, isolation_level=None))
                )
                connection.execute("BEGIN EXCLUSIVE")
            is_locked.set()
            is_over.wait()

    threading.Thread(target=keep, name="storage lock", daemon=True).start()
    is_locked.wait(SESSION_TIMEOUT_S)
    return is_over.set
