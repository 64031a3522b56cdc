"""Wait for a condition with a deadline; the kit sleeps nowhere else."""

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
    """Call `condition` until it returns a true value, and return that value.

    Args:
        condition: The function to poll.
        timeout_s: Maximum time to wait.
        what: Description for the error; a function is called at the deadline, so it can include
            the last state.
        interval_s: Pause between two calls.

    Raises:
        DagsterRebalanceError: The timeout has expired.
    """
    deadline_at = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        if time.monotonic() >= deadline_at:
            description = what if isinstance(what, str) else what()
            msg = f"timed out after {timeout_s:g} s waiting for {description}"
            raise DagsterRebalanceError(msg)
        time.sleep(interval_s)
