"""What a call leaves behind that had the turn of a consumer."""

from __future__ import annotations

import gc
import weakref

from dagster_rebalance.kafka.consumer.call_guard import CallGuard


class Records(list[int]):
    """What a poll returns."""


def test_the_records_of_a_poll_are_free_as_soon_as_its_caller_has_dropped_them() -> None:
    """Kept until Python looks for cycles, they made the next polls twice as slow."""
    guard = CallGuard()

    def poll() -> weakref.ref[Records]:
        records = Records([1, 2, 3])
        with guard.exclusive("poll"):
            return weakref.ref(records)

    gc.disable()
    try:
        assert poll()() is None
    finally:
        gc.enable()
