"""Free ports and temporary folders on this machine.

A folder's lock shows that its process lives; the next process removes folders whose lock is free.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import socket
import sys
import tempfile
from pathlib import Path

# Below the ports of outgoing connections (from 32768 on Linux), so a port stays free while its
# server restarts.
LOWEST, HIGHEST = 12_000, 32_000

_RESERVED: dict[int, socket.socket] = {}
"""The ports of this process; each socket is a lock that is held until the process ends."""

_PREFIX = "dagster-rebalance-"
_LOCK = ".in-use"
_HELD: list[int] = []
"""Open lock files; the locks are held until this process ends."""


def free_port() -> int:
    """Return a free port of 127.0.0.1, a different one at each call.

    On Linux, no other process that calls it gets the same port while this process lives: a server
    may listen only seconds later, and releases its port while it restarts.
    """
    while True:
        port = random.randint(LOWEST, HIGHEST)  # noqa: S311 - no secret
        if port not in _RESERVED and is_free(port) and _reserve(port):
            return port


def _reserve(port: int) -> bool:
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform == "linux":
        try:
            lock.bind(f"\0{_PREFIX}port-{port}")  # no file: the kernel removes it with the process
        except OSError:
            lock.close()
            return False
    _RESERVED[port] = lock
    return True


def is_free(port: int) -> bool:
    """Return whether a server can listen on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def accepts_connections(port: int) -> bool:
    """Return whether a server listens on this port of 127.0.0.1."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def private_folder(kind: str) -> Path:
    """Create a folder that only this user can read, and remove those of killed processes."""
    _remove_abandoned_folders()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
    # Locked before it gets its name: a folder whose lock is free belongs to no process.
    unnamed = folder / f"{_LOCK}-new"
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)
    _HELD.append(lock)
    return folder


def _remove_abandoned_folders() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            if lock.parent.stat().st_uid != os.getuid():
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # in use, or just removed by another process
            continue
        shutil.rmtree(lock.parent, ignore_errors=True)
