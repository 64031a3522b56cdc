"""Temporary folders of the kit; those of a killed kit are removed by the next one.

Owns the lock by which a folder shows that its process lives. Never removes a folder of another
user, or one without such a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "dagster-rebalance-"
_LOCK = ".in-use"
_HELD: list[int] = []
"""Locks are held as long as their files are open: until this process ends, however it ends."""


def private_folder(kind: str) -> Path:
    """A new folder that only this user can read.

    Removes those that killed processes have left behind.
    """
    _remove_left_overs()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
    # Locked before it gets its name: a folder whose lock is free is nobody's any more.
    unnamed = folder / f"{_LOCK}-new"
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)
    _HELD.append(lock)
    return folder


def _remove_left_overs() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            if lock.parent.stat().st_uid != os.getuid():
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # in use, or removed by somebody else meanwhile
            continue
        shutil.rmtree(lock.parent, ignore_errors=True)
