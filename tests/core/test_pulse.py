"""Dead runs are found, and only dead ones."""

from __future__ import annotations

from dataclasses import replace

from dagster_rebalance.core.pulse import Pulse
from dagster_rebalance.core.runs import RunSeen, RunState
from tests.core.world import span

RUN = RunSeen("r1", "b", (span(0, 0, 10),), RunState.STARTED, heartbeat="1")
PULSE = Pulse(heartbeat_timeout_s=60, start_timeout_s=300)


def dead_after(pulse: Pulse, run: RunSeen, seconds: int, *, first: int = 0) -> tuple[Pulse, list[int]]:
    """Look once a second; returns when the run was called dead."""
    found = []
    for now in range(first, first + seconds):
        pulse, dead = pulse.observe([run], float(now))
        if dead:
            assert dead == ("r1",)
            found.append(now)
    return pulse, found


def test_a_run_without_a_new_sign_is_dead_after_the_timeout() -> None:
    """Its process is gone; it is named again after another time-out, in case it could not be ended."""
    assert dead_after(PULSE, RUN, 130)[1] == [60, 120]
    assert dead_after(PULSE, replace(RUN, state=RunState.CANCELING), 61)[1] == [60]


def test_a_run_that_is_being_launched_gets_more_time() -> None:
    """A cluster may take minutes to start it."""
    assert dead_after(PULSE, replace(RUN, state=RunState.STARTING), 310)[1] == [300]


def test_a_run_that_waits_is_never_dead() -> None:
    """A queue may be long."""
    pulse, found = dead_after(PULSE, replace(RUN, state=RunState.WAITING), 1000)
    assert found == []
    assert pulse.signs == {}


def test_a_new_sign_or_a_new_state_is_life() -> None:
    """Only whether the sign changes is looked at, so clocks of different machines need not agree."""
    pulse, _ = dead_after(PULSE, RUN, 59)
    pulse, dead = pulse.observe([replace(RUN, heartbeat="2")], 60.0)
    assert dead == ()
    pulse, dead = pulse.observe([replace(RUN, heartbeat="2", state=RunState.CANCELING)], 61.0)
    assert pulse.signs["r1"].age_s == 0


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """Dagster's database was away for an hour: the run could not give a sign either."""
    pulse, _ = dead_after(PULSE, RUN, 10)
    pulse, dead = pulse.observe([RUN], 3600.0)
    assert dead == ()
    assert pulse.signs["r1"].age_s < 30
    assert dead_after(pulse, RUN, 60, first=3601)[1] != []


def test_a_run_that_ended_is_forgotten() -> None:
    """The memory stays flat."""
    pulse, _ = dead_after(PULSE, RUN, 10)
    pulse, _ = pulse.observe([], 11.0)
    assert pulse.signs == {}
