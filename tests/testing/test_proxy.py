"""The proxy closes all sockets and ends all threads."""

from __future__ import annotations

import socket
import threading

import pytest

from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.proxy import Proxy


@pytest.mark.parametrize("is_silent", [False, True])
def test_proxy_exit_ends_connections_and_threads(*, is_silent: bool) -> None:
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as target:
        target.settimeout(20)
        with Proxy(target.getsockname()[1]) as proxy:
            client = socket.create_connection(("127.0.0.1", proxy.port), timeout=120)
            with client:
                peer, _ = target.accept()
                with peer:
                    client.sendall(b"there")
                    assert peer.recv(5) == b"there"
                    peer.sendall(b"back")
                    assert client.recv(4) == b"back"
                    if is_silent:
                        proxy.fall_silent()
                        client.sendall(b"kept")
                    proxy.__exit__(None, None, None)
                    assert set(threading.enumerate()) <= before
                    assert client.recv(1) == b""


def test_proxy_exit_without_connections_ends_its_thread() -> None:
    before = set(threading.enumerate())
    with Proxy(1) as proxy:
        assert proxy.accepted == 0
    assert set(threading.enumerate()) <= before


def test_proxy_exit_during_an_accept_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    accepted = threading.Event()

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "proxy connection":
            accepted.set()
            wait_until(lambda: refuses(proxy.port), timeout_s=120, what="the end to begin")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    before = set(threading.enumerate())
    with Proxy(1) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=120):
        assert accepted.wait(120)
        proxy.__exit__(None, None, None)
        assert set(threading.enumerate()) <= before


def refuses(port: int) -> bool:
    """Return whether a port refuses connections."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=120).close()
    except ConnectionRefusedError:
        return True
    return False
