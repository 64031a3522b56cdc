"""User and password returned by `credentials_cb`, which may change while clients live.

Each client receives a new login from the thread that owns the client. Existing connections keep
their login; the next connection uses the new one. A password never appears in a message.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Protocol

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

ASK_EVERY_S = 30.0


class Client(Protocol):
    """The part of a confluent-kafka client that changes its login."""

    def set_sasl_credentials(self, username: str, password: str, /) -> None:
        """Set the credentials of all later connections."""


class Credentials:
    """User and password from `credentials_cb`, called every 30 s in the background. Thread-safe."""

    def __init__(
        self,
        function: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._function = function
        self._clock = clock
        self._start = start or _in_thread
        self._lock = threading.Lock()
        self._known: tuple[str, str] | None = None
        self._ask_at = 0.0
        self._is_asking = False

    def current(self) -> tuple[str, str]:
        """Return the user and the password; only the first call waits for the function.

        Raises:
            BrokerError: The function failed.
            ConfigurationError: The function did not return a user and a password.
        """
        if self._known is None:
            self._known = self._call()
            self._ask_at = self._clock() + ASK_EVERY_S
        elif self._is_due():
            self._start(self._renew)
        return self._known

    def _is_due(self) -> bool:
        with self._lock:
            now = self._clock()
            if now < self._ask_at:
                return False
            self._ask_at = now + ASK_EVERY_S
            was_asking, self._is_asking = self._is_asking, True
        if was_asking:
            logger.warning(
                "the last user and password stay in use: 'credentials_cb' has not answered for "
                "%.0f s or longer",
                ASK_EVERY_S,
            )
        return not was_asking

    def _renew(self) -> None:
        try:
            login = self._call()
            if login != self._known:
                logger.info("the next connections to Kafka log in with a new user or password")
            self._known = login
        except (BrokerError, ConfigurationError) as problem:
            logger.warning("the last user and password stay in use: %s", problem)
        finally:
            self._is_asking = False

    def _call(self) -> tuple[str, str]:
        try:
            login = self._function()
        except (Exception, SystemExit) as problem:
            msg = (
                f"'credentials_cb' raised {type(problem).__name__}: {problem}; "
                "check what the function needs"
            )
            raise BrokerError(msg, retriable=True) from problem
        match login:
            case (str(user), str(password)) if user and password:
                return user, password
        msg = "'credentials_cb' must return a user and a password, as two texts"
        raise ConfigurationError(msg)


class Login:
    """The login of one client. Used only by the thread that owns the client.

    Args:
        credentials: None for a client whose login does not change.
    """

    def __init__(self, credentials: Credentials | None, client: Client) -> None:
        self._credentials = credentials
        self._client = client
        self._current: tuple[str, str] | None = None

    def renew(self) -> None:
        """Pass a new user and password to the client, if there are any."""
        if self._credentials is not None and self._current != (
            latest := self._credentials.current()
        ):
            self._client.set_sasl_credentials(*latest)
            self._current = latest


def _in_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="credentials", daemon=True).start()
