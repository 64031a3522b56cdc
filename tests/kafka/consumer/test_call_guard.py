"""References that a guarded call leaves."""

from __future__ import annotations

import gc
import os
import weakref

from dagster_rebalance.kafka.consumer.call_guard import CallGuard


class Records(list[int]):
    """Records of a poll."""


def test_records_of_a_poll_are_freed_without_the_garbage_collector() -> None:
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


def test_guard_of_a_forked_process_refuses_calls() -> None:
    guard = CallGuard()
    child = os.fork()
    if not child:
        os._exit(guard.is_forked and not guard.is_free)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert guard.is_free
