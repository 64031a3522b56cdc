"""Ports for local servers.

Owns which ports of 127.0.0.1 this process has handed out.
"""

from __future__ import annotations

import random
import socket

# Below the ports that systems use for outgoing connections (from 32768 on Linux): a port stays free
# while its server restarts.
LOWEST, HIGHEST = 12_000, 32_000

_HANDED_OUT: set[int] = set()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, different at each call."""
    while True:
        port = random.randint(LOWEST, HIGHEST)  # noqa: S311 - no secret
        if port not in _HANDED_OUT and is_free(port):
            _HANDED_OUT.add(port)
            return port


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def accepts_connections(port: int) -> bool:
    """Whether somebody listens on this port of 127.0.0.1."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
