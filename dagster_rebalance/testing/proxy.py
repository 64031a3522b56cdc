"""A TCP proxy for tests can fall silent.

To its clients it then looks like a firewall that drops packets, or a database that hangs. While it
is silent it accepts connections and takes bytes, and passes none on. When it speaks again, it
passes on what it kept.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_CHUNK = 65_536


class Proxy:
    """Stands in front of a port of 127.0.0.1, on the port `port`.

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
        """Pass nothing on from now on."""
        self._speaks.clear()

    def speak(self) -> None:
        """Pass on what was kept, and what comes."""
        self._speaks.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all connections, and wait for the threads that serve them.

        Each thread closes its own sockets. To close a socket does not wake the thread that waits
        at it, to shut it down does.
        """
        self._is_over = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._acceptor.join()  # from here on no thread is added
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
                if self._is_over:  # it may have been shut down before it stood in the list
                    return
                onward = threading.Thread(target=self._pass_on, args=(client, server), daemon=True)
                onward.start()
                self._pass_on(server, client)
                onward.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                self._speaks.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
