"""User and password of a user's function (`credentials_cb`), which may change while clients live.

Owns when the function is asked, and that each client hears of what is new from the thread that owns
it. Connections that are logged in stay so; the next one that a client makes logs in with what is
new. Never shows a password.
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
    """What a client of confluent-kafka can do here."""

    def set_sasl_credentials(self, username: str, password: str, /) -> None:
        """Log in with these from the next connection on."""


class Credentials:
    """Asks the user's function now and then, in a thread of its own. Safe for several threads.

    Args:
        function: Returns the user and the password.
        clock: A monotonic clock.
        start: Runs a function in the background.
    """

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
        """The user and the password; the first time the function is waited for.

        Raises:
            BrokerError: The function failed.
            ConfigurationError: It returned something else.
        """
        if self._known is None:
            self._known = self._asked()
            self._ask_at = self._clock() + ASK_EVERY_S
        elif self._is_due():
            self._start(self._renew)
        return self._known

    def _is_due(self) -> bool:
        """Whether to ask now. One that has not answered yet is waited for, and told of."""
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
            found = self._asked()
            if found != self._known:
                logger.info("the next connections to Kafka log in with a new user or password")
            self._known = found
        except (BrokerError, ConfigurationError) as problem:
            logger.warning("the last user and password stay in use: %s", problem)
        finally:
            self._is_asking = False

    def _asked(self) -> tuple[str, str]:
        try:
            found = self._function()
        except (Exception, SystemExit) as problem:
            msg = (
                f"no user and password to log in with: 'credentials_cb' failed "
                f"({type(problem).__name__}: {problem}); see to what it needs"
            )
            raise BrokerError(msg, retriable=True) from problem
        match found:
            case (str(user), str(password)) if user and password:
                return user, password
        msg = "'credentials_cb' does not return a user and a password, as two texts"
        raise ConfigurationError(msg)


class Login:
    """What one client logs in with. Only to be used by the thread that owns the client.

    Args:
        credentials: None for a client whose login does not change.
        client: The client.
    """

    def __init__(self, credentials: Credentials | None, client: Client) -> None:
        self._credentials = credentials
        self._client = client
        self._has: tuple[str, str] | None = None

    def renew(self) -> None:
        """Tell the client what is new, if anything is."""
        if self._credentials is not None and self._has != (now := self._credentials.current()):
            self._client.set_sasl_credentials(*now)
            self._has = now


def _in_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="credentials", daemon=True).start()
