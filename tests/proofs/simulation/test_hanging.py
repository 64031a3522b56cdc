"""A hanging storage in the simulator blocks only its caller, and leaves no thread behind."""

from __future__ import annotations

import threading

import pytest

from proofs.simulation.clockwork import Clockwork, Violation
from proofs.simulation.hanging import Hanging


def begun(clockwork: Clockwork, told: list[str], *, fails: bool = False) -> None:
    """Work that hangs for ten seconds."""

    def work() -> None:
        told.append("begins")
        hanging.wait(10)
        told.append("ends")
        if fails:
            msg = "seen"
            raise Violation(msg)

    hanging = Hanging(clockwork, work, lambda go_on: go_on())
    hanging.go_on()


def test_other_processes_continue_while_a_call_hangs() -> None:
    clockwork, told = Clockwork(1), list[str]()
    begun(clockwork, told)
    clockwork.after(5, None, lambda: told.append("another"))
    clockwork.run(9)
    assert told == ["begins", "another"]
    clockwork.run(2)
    assert told == ["begins", "another", "ends"]
    assert clockwork.hanging == []


def test_violation_in_a_hanging_call_ends_the_schedule() -> None:
    clockwork = Clockwork(1)
    begun(clockwork, [], fails=True)
    with pytest.raises(Violation, match="seen"):
        clockwork.run(11)


def test_call_that_hangs_at_the_end_is_abandoned() -> None:
    clockwork, told = Clockwork(1), list[str]()
    before = threading.active_count()
    begun(clockwork, told)
    hangs = [thread for thread in threading.enumerate() if thread.name == "simulated hang"]
    clockwork.stop()
    for thread in hangs:
        thread.join(10)
    assert told == ["begins"]
    assert threading.active_count() <= before
