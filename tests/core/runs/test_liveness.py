"""Dead runs are found, and only dead ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.model.run import RunSeen, RunState
from dagster_rebalance.core.runs.liveness import Liveness
from tests.core.world import span

RUN = RunSeen("r1", "b", (span(0, 0, 10),), RunState.STARTED, heartbeat="1")
PULSE = Liveness(heartbeat_timeout_s=60, start_timeout_s=300)


def dead_after(
    pulse: Liveness, run: RunSeen, seconds: int, *, first: int = 0
) -> tuple[Liveness, list[int]]:
    """Look once a second; returns when the run was called dead."""
    found = []
    for now in range(first, first + seconds):
        pulse, dead = pulse.observe([run], float(now))
        if dead:
            assert dead == ("r1",)
            found.append(now)
    return pulse, found


def test_a_run_without_a_new_sign_is_dead_after_the_timeout() -> None:
    """The process of the run is gone.

    The pulse names the run again after a quarter of the time-out, in case it could not be ended.
    """
    pulse, dead = dead_after(PULSE, RUN, 100)
    assert dead == [60, 75, 90]
    assert pulse.named == {"r1"}
    assert not dead_after(pulse, replace(RUN, heartbeat="2"), 1, first=101)[0].named
    assert dead_after(PULSE, replace(RUN, state=RunState.CANCELING), 61)[1] == [60]


def test_a_run_that_was_told_a_longer_timeout_is_judged_by_that() -> None:
    """It gives signs as often, and stops itself as late, as it was told when it began."""
    told = replace(RUN, heartbeat_timeout_s=100.0)
    pulse, dead = dead_after(PULSE, told, 110)
    assert dead == [100]
    over = replace(told, state=RunState.FAILED, is_over=False)
    pulse, _ = PULSE.observe([over], 0.0)
    assert pulse.unconfirmed == {"r1": 100.0}
    assert dead_after(PULSE, replace(RUN, heartbeat_timeout_s=20.0), 70)[1] == [60]


def test_a_run_that_is_being_launched_gets_more_time() -> None:
    """A cluster may take minutes to start it."""
    assert dead_after(PULSE, replace(RUN, state=RunState.STARTING), 310)[1] == [300]


def test_a_re_execution_that_nobody_submitted_is_dead_after_the_time_of_a_start() -> None:
    """The webserver was killed between creating the run and submitting it.

    No sensor requests the run again, and it would count as at work for ever.
    """
    created = replace(RUN, state=RunState.CREATED, heartbeat="", parent_id="r0")
    assert dead_after(PULSE, created, 310)[1] == [300]
    assert dead_after(PULSE, replace(created, parent_id="", attempt=1), 310)[1] == [], (
        "its sensor requests it again"
    )
    assert dead_after(PULSE, replace(created, state=RunState.WAITING), 310)[1] == [], (
        "a queue may be long"
    )


def test_a_run_that_has_started_and_not_begun_its_work_gets_the_time_of_a_start() -> None:
    """The other resources of a run, a cluster for example, start before its first sign of life."""
    assert dead_after(PULSE, replace(RUN, heartbeat=""), 310)[1] == [300]


def test_a_run_that_is_cancelled_before_it_began_does_not_get_the_time_of_a_start() -> None:
    """A launcher that deleted a pending pod leaves the run in that state for ever."""
    assert dead_after(PULSE, replace(RUN, heartbeat="", state=RunState.CANCELING), 61)[1] == [60]


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELED])
def test_a_run_that_ended_in_dagster_only_is_dead_after_the_timeout(state: RunState) -> None:
    """The process of the run may work on after its end was reported in Dagster.

    Its code server, run monitoring or a person reported that end. The process gives signs as long
    as it works.
    """
    ended = replace(RUN, state=state, is_over=False)
    assert dead_after(PULSE, ended, 61)[1] == [60]
    pulse, _ = dead_after(PULSE, ended, 59)
    assert pulse.unconfirmed == {"r1": 2.0}
    _, dead = pulse.observe([replace(ended, heartbeat="2")], 60.0)
    assert dead == ()
    assert pulse.observe([replace(ended, is_over=True)], 60.0) == (
        replace(pulse, signs={}, observed_at=60.0),
        (),
    )


def test_the_end_that_dagster_shows_is_no_sign_of_life() -> None:
    """Its process was silent before; the time counts from its last sign."""
    pulse, _ = dead_after(PULSE, RUN, 40)
    assert dead_after(pulse, replace(RUN, state=RunState.FAILED, is_over=False), 30, first=40)[
        1
    ] == [60]


@pytest.mark.parametrize("state", [RunState.STARTED, RunState.FAILED])
def test_a_run_whose_process_is_known_to_be_gone_is_dead_at_once(state: RunState) -> None:
    """The run said that it is finished, or somebody looked for its process.

    The pulse names it again only after a part of the time-out.
    """
    gone = replace(RUN, state=state, is_gone=True, is_over=False)
    assert dead_after(PULSE, gone, 32)[1] == [0, 15, 30]


def test_a_run_that_is_deleted_while_it_works_is_watched_on() -> None:
    """Deleting it in the UI ends no process."""
    pulse, _ = dead_after(PULSE, RUN, 30)
    assert pulse.batch_ids == {"b"}
    (watched,) = pulse.completed([], {"b"})
    assert (watched.run_id, watched.is_live, watched.state) == ("r1", True, RunState.DELETED)
    assert pulse.completed([], {"another"}) == (), "its batch was not asked for"
    assert pulse.completed([RUN], {"b"}) == (RUN,)
    for now in range(30, 60):
        assert dead_after(pulse, watched, 1, first=now)[1] == []
        pulse, _ = pulse.observe(pulse.completed([], {"b"}), float(now))
    pulse, dead = pulse.observe(pulse.completed([], {"b"}), 60.0)
    assert dead == ("r1",)
    assert pulse.without("r1").completed([], {"b"}) == ()


def test_a_run_that_is_deleted_before_it_began_is_forgotten() -> None:
    """Dagster starts no run that is not there."""
    pulse, _ = dead_after(PULSE, replace(RUN, state=RunState.STARTING, heartbeat=""), 30)
    assert pulse.batch_ids == frozenset()
    assert pulse.completed([], {"b"}) == ()


def test_a_run_that_waits_is_never_dead() -> None:
    """A queue may be long."""
    pulse, found = dead_after(PULSE, replace(RUN, state=RunState.WAITING), 1000)
    assert found == []
    assert pulse.signs == {}


def test_a_new_sign_is_life() -> None:
    """The pulse only looks whether the sign changes.

    Clocks of different machines need not agree.
    """
    pulse, _ = dead_after(PULSE, RUN, 59)
    pulse, dead = pulse.observe([replace(RUN, heartbeat="2")], 60.0)
    assert dead == ()
    assert pulse.signs["r1"].age_s == 0


def test_a_new_state_is_life_before_the_first_sign() -> None:
    """A run that goes from being launched to started has a process."""
    pulse, _ = dead_after(PULSE, replace(RUN, state=RunState.STARTING, heartbeat=""), 200)
    pulse, _ = pulse.observe([replace(RUN, heartbeat="")], 201.0)
    assert pulse.signs["r1"].age_s == 0


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """Dagster's database was away for an hour: the run could not give a sign either."""
    pulse, _ = dead_after(PULSE, RUN, 10)
    pulse, dead = pulse.observe([RUN], 3600.0)
    assert dead == ()
    assert pulse.signs["r1"].age_s < 30
    assert dead_after(pulse, RUN, 60, first=3601)[1] != []


def test_a_clock_that_is_set_back_does_not_make_a_dead_run_younger() -> None:
    """The sensor of streaming runs has no other clock; two code servers may have two."""
    pulse, _ = dead_after(PULSE, RUN, 50)
    pulse, _ = pulse.observe([RUN], -3600.0)
    assert pulse.signs["r1"].age_s >= 49
    assert dead_after(pulse, RUN, 20, first=-3599)[1] != []


def test_a_run_that_ended_is_forgotten() -> None:
    """The memory stays flat."""
    pulse, _ = dead_after(PULSE, RUN, 10)
    pulse, _ = pulse.observe([], 11.0)
    assert pulse.signs == {}


def test_a_look_goes_on_from_what_an_earlier_one_has_left() -> None:
    """A sensor lives for one tick, and the next tick may come to another process."""
    pulse, found = PULSE, []
    for now in range(0, 100, 5):
        pulse, dead = PULSE.remembering(pulse.memory).observe([RUN], float(now))
        found += [now] * len(dead)
    assert found == [60, 75, 90]


@pytest.mark.parametrize(
    "memory",
    [None, "", "v1", "[]", "{}", '{"signs": [["r1"]], "observed_at": 1}', '{"signs": 1}'],
)
def test_what_cannot_be_read_is_forgotten(memory: str | None) -> None:
    """People may write into the cursor of a sensor: then the time-out begins anew."""
    assert PULSE.remembering(memory) == PULSE


def test_a_memory_may_have_a_sentence_before_it() -> None:
    """The list of ticks shows the cursor of a sensor."""
    found, _ = PULSE.observe([RUN], 10.0)
    for memory in (found.memory, f"1 of 1 streaming runs live\n{found.memory}"):
        assert PULSE.remembering(memory).signs.keys() == found.signs.keys()
    assert PULSE.remembering("1 stopped, 6 owned") == PULSE
