"""Detection of dead runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.runs.liveness import Liveness
from tests.core.world import span

RUN = RunSnapshot("r1", "b", (span(0, 0, 10),), RunState.STARTED, heartbeat="1")
LIVENESS = Liveness(heartbeat_timeout_s=60, start_timeout_s=300)


def dead_after(
    liveness: Liveness, run: RunSnapshot, seconds: int, *, first: int = 0
) -> tuple[Liveness, list[int]]:
    """Observe once a second; return when the run was reported dead."""
    found = []
    for now in range(first, first + seconds):
        liveness, dead = liveness.observe([run], float(now))
        if dead:
            assert dead == ("r1",)
            found.append(now)
    return liveness, found


def test_run_without_new_heartbeat_is_dead_after_timeout() -> None:
    liveness, dead = dead_after(LIVENESS, RUN, 100)
    assert dead == [60, 75, 90]
    assert liveness.reported_dead == {"r1"}
    assert not dead_after(liveness, replace(RUN, heartbeat="2"), 1, first=101)[0].reported_dead
    assert dead_after(LIVENESS, replace(RUN, state=RunState.CANCELING), 61)[1] == [60]


def test_run_with_longer_timeout_is_dead_after_its_own() -> None:
    told = replace(RUN, heartbeat_timeout_s=100.0)
    liveness, dead = dead_after(LIVENESS, told, 110)
    assert dead == [100]
    over = replace(told, state=RunState.FAILED, is_over=False)
    liveness, _ = LIVENESS.observe([over], 0.0)
    assert liveness.unconfirmed == {"r1": 100.0}
    assert dead_after(LIVENESS, replace(RUN, heartbeat_timeout_s=20.0), 70)[1] == [60]


def test_launching_run_has_start_timeout() -> None:
    assert dead_after(LIVENESS, replace(RUN, state=RunState.STARTING), 310)[1] == [300]


def test_unsubmitted_re_execution_is_dead_after_start_timeout() -> None:
    """No sensor requests it again if the webserver was killed before submitting it."""
    created = replace(RUN, state=RunState.CREATED, heartbeat="", parent_id="r0")
    assert dead_after(LIVENESS, created, 310)[1] == [300]
    assert dead_after(LIVENESS, replace(created, parent_id="", attempt=1), 310)[1] == [], (
        "its sensor requests it again"
    )
    assert dead_after(LIVENESS, replace(created, state=RunState.WAITING), 310)[1] == [], (
        "a queue may be long"
    )


def test_started_run_without_heartbeat_has_start_timeout() -> None:
    assert dead_after(LIVENESS, replace(RUN, heartbeat=""), 310)[1] == [300]


def test_canceling_run_without_heartbeat_has_heartbeat_timeout() -> None:
    assert dead_after(LIVENESS, replace(RUN, heartbeat="", state=RunState.CANCELING), 61)[1] == [60]


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELED])
def test_run_that_ended_in_dagster_only_is_dead_after_timeout(state: RunState) -> None:
    """Run monitoring or a user may end it in Dagster while its process works."""
    ended = replace(RUN, state=state, is_over=False)
    assert dead_after(LIVENESS, ended, 61)[1] == [60]
    liveness, _ = dead_after(LIVENESS, ended, 59)
    assert liveness.unconfirmed == {"r1": 2.0}
    _, dead = liveness.observe([replace(ended, heartbeat="2")], 60.0)
    assert dead == ()
    assert liveness.observe([replace(ended, is_over=True)], 60.0) == (
        replace(liveness, tracked={}, observed_at=60.0),
        (),
    )


def test_end_in_dagster_does_not_reset_age() -> None:
    liveness, _ = dead_after(LIVENESS, RUN, 40)
    assert dead_after(liveness, replace(RUN, state=RunState.FAILED, is_over=False), 30, first=40)[
        1
    ] == [60]


@pytest.mark.parametrize("state", [RunState.STARTED, RunState.FAILED])
def test_run_with_gone_process_is_dead_at_once(state: RunState) -> None:
    gone = replace(RUN, state=state, is_gone=True, is_over=False)
    assert dead_after(LIVENESS, gone, 32)[1] == [0, 15, 30]


def test_deleted_working_run_stays_tracked() -> None:
    liveness, _ = dead_after(LIVENESS, RUN, 30)
    assert liveness.batch_ids == {"b"}
    (watched,) = liveness.with_deleted([], {"b"})
    assert (watched.run_id, watched.is_live, watched.state) == ("r1", True, RunState.DELETED)
    assert liveness.with_deleted([], {"another"}) == (), "its batch was not asked for"
    assert liveness.with_deleted([RUN], {"b"}) == (RUN,)
    for now in range(30, 60):
        assert dead_after(liveness, watched, 1, first=now)[1] == []
        liveness, _ = liveness.observe(liveness.with_deleted([], {"b"}), float(now))
    liveness, dead = liveness.observe(liveness.with_deleted([], {"b"}), 60.0)
    assert dead == ("r1",)
    assert liveness.without("r1").with_deleted([], {"b"}) == ()


def test_run_deleted_before_heartbeat_is_dropped() -> None:
    liveness, _ = dead_after(LIVENESS, replace(RUN, state=RunState.STARTING, heartbeat=""), 30)
    assert liveness.batch_ids == frozenset()
    assert liveness.with_deleted([], {"b"}) == ()


def test_queued_run_is_never_dead() -> None:
    liveness, found = dead_after(LIVENESS, replace(RUN, state=RunState.WAITING), 1000)
    assert found == []
    assert liveness.tracked == {}


def test_new_heartbeat_resets_age() -> None:
    liveness, _ = dead_after(LIVENESS, RUN, 59)
    liveness, dead = liveness.observe([replace(RUN, heartbeat="2")], 60.0)
    assert dead == ()
    assert liveness.tracked["r1"].age_s == 0


def test_new_state_before_heartbeat_resets_age() -> None:
    liveness, _ = dead_after(LIVENESS, replace(RUN, state=RunState.STARTING, heartbeat=""), 200)
    liveness, _ = liveness.observe([replace(RUN, heartbeat="")], 201.0)
    assert liveness.tracked["r1"].age_s == 0


def test_time_without_observation_does_not_count() -> None:
    liveness, _ = dead_after(LIVENESS, RUN, 10)
    liveness, dead = liveness.observe([RUN], 3600.0)
    assert dead == ()
    assert liveness.tracked["r1"].age_s < 30
    assert dead_after(liveness, RUN, 60, first=3601)[1] != []


def test_clock_set_back_does_not_reset_age() -> None:
    liveness, _ = dead_after(LIVENESS, RUN, 50)
    liveness, _ = liveness.observe([RUN], -3600.0)
    assert liveness.tracked["r1"].age_s >= 49
    assert dead_after(liveness, RUN, 20, first=-3599)[1] != []


def test_ended_run_is_dropped() -> None:
    liveness, _ = dead_after(LIVENESS, RUN, 10)
    liveness, _ = liveness.observe([], 11.0)
    assert liveness.tracked == {}


def test_liveness_continues_from_serialized_state() -> None:
    liveness, found = LIVENESS, []
    for now in range(0, 100, 5):
        liveness, dead = LIVENESS.deserialized(liveness.serialized).observe([RUN], float(now))
        found += [now] * len(dead)
    assert found == [60, 75, 90]


@pytest.mark.parametrize(
    "memory",
    [None, "", "v1", "[]", "{}", '{"signs": [["r1"]], "observed_at": 1}', '{"signs": 1}'],
)
def test_unreadable_cursor_is_ignored(memory: str | None) -> None:
    assert LIVENESS.deserialized(memory) == LIVENESS


def test_cursor_may_have_text_before_state() -> None:
    found, _ = LIVENESS.observe([RUN], 10.0)
    for memory in (found.serialized, f"1 of 1 streaming runs live\n{found.serialized}"):
        assert LIVENESS.deserialized(memory).tracked.keys() == found.tracked.keys()
    assert LIVENESS.deserialized("1 stopped, 6 owned") == LIVENESS
