"""Tokens of the user's `oauth_cb`, shared by all clients of one configuration.

Reports an invalid result before a client is created: the client itself would wait for 10 s and then
report no token, or end with an error that cannot be caught (confluent-kafka 2.16.1, `error_cb`).
A token never appears in a message.
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

Token: TypeAlias = Any
"""The result of the user's function: a tuple of the token, its expiry, and the further values that
confluent-kafka accepts."""

_FRESH = 0.5
"""A token is passed to another client for this share of its life. A client requests the next token
when a fifth is left."""
_EXTENSION = re.compile(r"[A-Za-z]+")
_LONGEST_S = 10 * 365 * 86_400.0
"""A function that returns milliseconds would never be called again."""


class Tokens:
    """Returns tokens of the user's function, and caches the last one. Thread-safe.

    Args:
        function: Takes the text of `sasl.oauthbearer.config`; returns the token and its expiry, in
            seconds since 1970.
        clock: Seconds since 1970.
    """

    def __init__(
        self, function: Callable[..., Token], clock: Callable[[], float] = time.time
    ) -> None:
        self._function = function
        self._clock = clock
        self._lock = threading.Lock()
        self._last: Token = ()
        self._fresh_until = 0.0

    def __call__(self, config: str) -> Token:
        """Return a valid token.

        Raises:
            BrokerError: The function fails, and no earlier token is valid.
            ConfigurationError: The function does not return a token.
        """
        with self._lock:
            now = self._clock()
            if now < self._fresh_until:
                return self._last
            try:
                token = self._new_token(config, now)
            except (BrokerError, ConfigurationError) as problem:
                if not self._last or now >= self._last[1]:
                    raise
                logger.warning("%s: the last token is used for as long as it is valid", problem)
                return self._last
            self._last = token
            self._fresh_until = now + (token[1] - now) * _FRESH
            return token

    def _new_token(self, config: str, now: float) -> Token:
        try:
            token = self._function(config)
        except Exception as problem:
            msg = (
                f"'oauth_cb' raised {type(problem).__name__}: {problem}; "
                "check what the function needs"
            )
            raise BrokerError(msg, retriable=True) from problem
        problem_text = _why_no_token(token, now)
        if problem_text is not None:
            msg = f"'oauth_cb' {problem_text}"
            raise ConfigurationError(msg)
        return token


def _why_no_token(token: Token, now: float) -> str | None:
    is_token = isinstance(token, tuple) and len(token) > 1 and _is_token_text(token[0])
    if not is_token or type(token[1]) not in {int, float} or not math.isfinite(token[1]):
        return "must return a token and when it expires, as (text, seconds since 1970)"
    if not _is_accepted(token[2:]):
        return (
            "returns more than a token and when it expires: only the name of the principal, as a "
            "text, and extensions, as a mapping of names (letters) to texts, may follow"
        )
    if token[1] > now + _LONGEST_S:
        return (
            "returns a token that expires in more than ten years: give the time in seconds since "
            "1970, not in milliseconds"
        )
    if token[1] <= now:
        return f"returns a token that expired {now - token[1]:.0f} s ago: return a new one"
    return None


def _is_accepted(rest: tuple[object, ...]) -> bool:
    """Return whether the values after the expiry are valid: invalid ones may crash the process."""
    match rest:
        case () | (str(),):
            return True
        case (str(), dict() as extensions):
            return all(
                isinstance(name, str)
                and _EXTENSION.fullmatch(name)
                and name != "auth"
                and isinstance(text, str)
                and text.isprintable()
                for name, text in extensions.items()
            )
        case _:
            return False


def _is_token_text(text: object) -> bool:
    return isinstance(text, str) and text.isascii() and text.isprintable() and text != ""
