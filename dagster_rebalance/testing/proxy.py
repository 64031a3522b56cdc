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
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.accepted = 0
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

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
        """End all connections."""
        self._server.close()
        for end in tuple(self._sockets):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.speak()

    def _accept(self) -> None:
        with suppress(OSError):  # the end of the proxy
            while True:
                client, _ = self._server.accept()
                self.accepted += 1
                threading.Thread(
                    target=self._serve, args=(client,), name="proxy connection", daemon=True
                ).start()

    def _serve(self, client: socket.socket) -> None:
        self._sockets.append(client)
        self._speaks.wait()
        with suppress(OSError):
            server = socket.create_connection(("127.0.0.1", self._target_port))
            self._sockets.append(server)
            threading.Thread(
                target=self._pass_on, args=(client, server), name="proxy to", daemon=True
            ).start()
            self._pass_on(server, client)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                self._speaks.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
