"""A TCP proxy that can stall, as a firewall that drops packets or a database that hangs does.

While stalled it accepts connections and reads bytes, and forwards them later.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_CHUNK = 65_536


class Proxy:
    """A TCP proxy for a port of 127.0.0.1. It listens on `port`.

    Example:
        ```python
        with Proxy(postgres.port) as proxy:
            proxy.fall_silent()
        ```
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._speaks = threading.Event()
        self._speaks.set()
        self._is_over = False
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.accepted = 0
        self._acceptor = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._acceptor.start()

    def fall_silent(self) -> None:
        """Stop forwarding."""
        self._speaks.clear()

    def speak(self) -> None:
        """Forward the buffered bytes, and continue to forward."""
        self._speaks.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close all connections and wait for their threads.

        Each thread closes its own sockets: only a shutdown wakes a thread that waits for a socket.
        """
        self._is_over = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._acceptor.join()  # no thread is added from here on
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.speak()
        while self._threads:
            self._threads.pop().join()

    def _accept(self) -> None:
        with suppress(OSError):  # the end of the proxy
            while True:
                client, _ = self._server.accept()
                self.accepted += 1
                connection = threading.Thread(
                    target=self._serve, args=(client,), name="proxy connection", daemon=True
                )
                connection.start()
                self._threads.append(connection)

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            self._ends.append(client)
            self._speaks.wait()
            with socket.create_connection(("127.0.0.1", self._target_port)) as server:
                self._ends.append(server)
                if self._is_over:  # the exit may have missed these sockets
                    return
                upstream = threading.Thread(
                    target=self._forward, args=(client, server), daemon=True
                )
                upstream.start()
                self._forward(server, client)
                upstream.join()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                self._speaks.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
