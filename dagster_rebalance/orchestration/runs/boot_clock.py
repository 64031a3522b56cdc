"""A clock that goes on while a machine sleeps, as the time-outs of others do."""

from __future__ import annotations

import time


def seconds() -> float:
    """Return seconds that also pass while a laptop sleeps or a virtual machine is suspended.

    Linux's monotonic clock stands still then.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
