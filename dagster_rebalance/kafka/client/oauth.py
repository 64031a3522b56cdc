"""Tokens of a user's function (`oauth_cb`), for all clients of one configuration.

Owns that what the function does wrong is an error with words, before a client is made: the client
itself would wait for 10 s and then say that it got no token, or end with an error that cannot be
caught (confluent-kafka 2.16.1, with an `error_cb`). Owns that an issuer which is away for a moment
costs nothing: the last token is given again as long as it is valid. Never shows a token.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

Given: TypeAlias = Any
"""What the user's function returns: a tuple of the token, when it expires, and what else
confluent-kafka takes."""

_FRESH = 0.5
"""The part of its life that a token must have before it, to be given to another client. A client
asks for the next one when a fifth is left."""
_EXTENSION = re.compile(r"[A-Za-z]+")
_LONGEST_S = 10 * 365 * 86_400.0
"""Who returns milliseconds would never be asked again."""


class Tokens:
    """Asks the user's function, and remembers its last token. Safe for several threads.

    Args:
        function: Takes the text of `sasl.oauthbearer.config`; returns the token and when it
            expires, in seconds since 1970.
        clock: Seconds since 1970.
    """

    def __init__(
        self, function: Callable[..., Given], clock: Callable[[], float] = time.time
    ) -> None:
        self._function = function
        self._clock = clock
        self._lock = threading.Lock()
        self._last: Given = ()
        self._fresh_until = 0.0

    def __call__(self, config: str) -> Given:
        """A valid token.

        Raises:
            BrokerError: The function fails, and no token is left that is valid.
            ConfigurationError: What the function returns is no token.
        """
        with self._lock:
            now = self._clock()
            if now < self._fresh_until:
                return self._last
            try:
                token = self._asked(config, now)
            except (BrokerError, ConfigurationError) as problem:
                if not self._last or now >= self._last[1]:
                    raise
                logger.warning("%s: the last token is used for as long as it is valid", problem)
                return self._last
            self._last = token
            self._fresh_until = now + (token[1] - now) * _FRESH
            return token

    def _asked(self, config: str, now: float) -> Given:
        try:
            token = self._function(config)
        except Exception as problem:
            msg = (
                f"no token to log in with: 'oauth_cb' failed ({type(problem).__name__}: "
                f"{problem}); see to what it needs"
            )
            raise BrokerError(msg, retriable=True) from problem
        return _checked(token, now)


def _checked(token: Given, now: float) -> Given:
    is_token = isinstance(token, tuple) and len(token) > 1 and _is_text(token[0])
    if not is_token or type(token[1]) not in {int, float} or not math.isfinite(token[1]):
        problem = "does not return a token and when it expires, as (text, seconds since 1970)"
    elif not _is_rest(token[2:]):
        problem = (
            "returns more than a token and when it expires: only the name of the principal, as a "
            "text, and extensions, as a mapping of names (letters) to texts, may follow"
        )
    elif token[1] > now + _LONGEST_S:
        problem = (
            "returns a token that expires in more than ten years: give the time in seconds since "
            "1970, not in milliseconds"
        )
    elif token[1] <= now:
        problem = f"returns a token that expired {now - token[1]:.0f} s ago: return a new one"
    else:
        return token
    msg = f"'oauth_cb' {problem}"
    raise ConfigurationError(msg)


def _is_rest(rest: tuple[object, ...]) -> bool:
    """Whether the client takes what follows the time. What it does not take can end the process."""
    match rest:
        case () | (str(),):
            return True
        case (str(), dict() as extensions):
            names_and_texts = extensions.items()
        case _:
            return False
    return all(
        isinstance(name, str)
        and _EXTENSION.fullmatch(name)
        and name != "auth"
        and isinstance(text, str)
        and text.isprintable()
        for name, text in names_and_texts
    )


def _is_text(token: object) -> bool:
    return isinstance(token, str) and token.isascii() and token.isprintable() and token != ""
