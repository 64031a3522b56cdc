"""Waiting for real parts: poll a condition until a deadline, never sleep for a guessed time.

Owns the clock and the sleep of this kit.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from dagster_rebalance.core.model.errors import DagsterRebalanceError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T | None],
    *,
    timeout_s: float,
    what: str | Callable[[], str],
    interval_s: float = 0.05,
) -> T:
    """Call `condition` until it returns something true, and return that.

    Args:
        condition: What is waited for.
        timeout_s: How long to wait at most.
        what: What to say was waited for; a function is called at the deadline, and can say what was
            seen last.
        interval_s: The pause between two calls.

    Raises:
        DagsterRebalanceError: The deadline has passed.
    """
    deadline_at = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        if time.monotonic() >= deadline_at:
            msg = f"waited {timeout_s:g} s in vain for {what if isinstance(what, str) else what()}"
            raise DagsterRebalanceError(msg)
        time.sleep(interval_s)
