"""Processes of simulated runs: their ends, and the ranges that are processed again."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.core.model.run_snapshot import BatchRequest, RunState
from proofs.simulation.clockwork import Violation
from proofs.simulation.coordinator import TOPIC
from proofs.simulation.world import World

RANGE = OffsetRange(TOPIC, 0, 1_000, 1_010)
QUIET = 2
"""A seed whose schedule has no faults."""


@pytest.fixture
def world() -> World:
    """A world without faults."""
    return World(QUIET)


def at_work(world: World) -> str:
    """Return a run that has begun and works alone on a range."""
    dagster = world.dagster
    run_id = dagster.create("b", (RANGE,))
    dagster.runs[run_id] = world.dagster.seen(["b"], with_live=False)[-1]
    dagster._move(run_id, RunState.STARTED, has_started=True)
    dagster.processes[run_id].has_begun = dagster.processes[run_id].is_working = True
    return run_id


def end(world: World, run_id: str) -> None:
    """End a run as a member does that has read its last heartbeat."""
    sign = world.dagster.processes[run_id].sign(world.clockwork.now)
    assert world.dagster.end_dead(run_id, sign)
    assert world.dagster.call_over(run_id, sign)


def test_run_cut_off_that_completes_its_output_has_not_succeeded(
    world: World,
) -> None:
    """Seed 3147318: Dagster never records the success, so a second run replaces the output."""
    run_id = at_work(world)
    world.dagster.cut_off(run_id, 100)
    world.dagster.processes[run_id].is_working = False
    world.dagster._report(run_id, RunState.SUCCEEDED)
    world.clockwork.run(12)
    assert world.dagster.processes[run_id].is_gone
    end(world, run_id)
    assert world.dagster.runs[run_id].state is RunState.FAILED
    assert RANGE.topic_partition not in world.dagster.outputs.done or all(
        entry[2] != run_id for entry in world.dagster.outputs.done[RANGE.topic_partition]
    )


def test_run_cut_off_stops_before_it_counts_as_dead(world: World) -> None:
    run_id = at_work(world)
    world.dagster.cut_off(run_id, 100)
    world.clockwork.run(world.weather.settings.liveness.heartbeat_timeout_s)
    assert not world.dagster.processes[run_id].is_working


def test_run_that_reaches_the_storage_within_its_lease_continues(world: World) -> None:
    run_id = at_work(world)
    world.dagster.cut_off(run_id, 2)
    world.clockwork.run(20)
    assert world.dagster.processes[run_id].is_working


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELED])
def test_run_ended_in_dagster_is_live_until_its_process_has_stopped(
    world: World, state: RunState
) -> None:
    run_id = at_work(world)
    world.weather.runs_retry = 0.0
    world.dagster.mark_ended(run_id, state)
    (seen,) = world.dagster.seen(["b"], with_live=False)
    assert seen.is_live
    assert world.dagster.processes[run_id].is_working
    world.clockwork.run(3)
    assert not world.dagster.processes[run_id].is_working
    (seen,) = world.dagster.seen(["b"], with_live=False)
    assert seen.is_gone
    end(world, run_id)
    (seen,) = world.dagster.seen(["b"], with_live=False)
    assert not seen.is_live


def test_run_with_a_newer_heartbeat_is_not_ended(world: World) -> None:
    run_id = at_work(world)
    assert not world.dagster.end_dead(run_id, "")
    assert not world.dagster.call_over(run_id, "")
    assert world.dagster.processes[run_id].is_working


def test_deleted_run_is_known_by_its_range_owners(world: World) -> None:
    run_id = at_work(world)
    claim = ("b", RANGE)
    world.dagster.notes[claim] = run_id
    world.dagster.delete(run_id)
    (seen,) = world.dagster.seen(["b"], with_live=False, claims=[claim])
    assert (seen.run_id, seen.state, seen.is_over) == (run_id, RunState.DELETED, False)
    world.dagster.processes[run_id].is_working = False
    end(world, run_id)
    assert world.dagster.seen(["b"], with_live=False, claims=[claim]) == ()


def test_end_of_a_run_that_works_without_heartbeats_is_a_violation(world: World) -> None:
    run_id = at_work(world)
    world.dagster.cut_off(run_id, 100)
    with pytest.raises(Violation, match="although it works and cannot give a sign of life"):
        end(world, run_id)


def test_spark_work_that_outlives_its_process_counts_until_it_is_ended(
    world: World,
) -> None:
    run_id = at_work(world)
    world.weather.spark_outlives = True
    world.dagster.die(run_id)
    assert world.dagster.is_busy(TopicPartition(TOPIC, 0))
    end(world, run_id)
    assert world.dagster.working() == [
        run for run in world.dagster.working() if run.run_id != run_id
    ]


def test_range_is_done_when_each_asset_has_it(world: World) -> None:
    world.weather.assets = ("orders", "totals")
    partition = RANGE.topic_partition
    for asset in world.weather.assets:
        assert all(
            start != RANGE.start for start, _, _ in world.dagster.outputs.done.get(partition, ())
        )
        run_id = world.dagster.create("b", (RANGE,), parent_id="r", assets=(asset,))
        world.dagster._succeed(run_id)
    assert [
        entry[:2] for entry in world.dagster.outputs.done[partition] if entry[0] == RANGE.start
    ] == [(RANGE.start, RANGE.until)]


def test_failed_launch_begins_nothing(world: World) -> None:
    world.weather.launches_fail = 1.0
    run_id = world.dagster.create("b", (RANGE,))
    world.dagster._move(run_id, RunState.WAITING)
    world.dagster._launch(run_id)
    assert world.dagster.runs[run_id].state is RunState.FAILED
    assert not world.dagster.runs[run_id].has_started
    assert world.dagster.processes[run_id].is_gone


def test_first_heartbeat_of_a_run_may_take_longer_than_a_member_waits(world: World) -> None:
    world.weather.stalls = 0.2
    seconds = [world.weather.reaching_its_check() for _ in range(200)]
    assert max(seconds) > world.weather.settings.liveness.start_timeout_s
    assert sorted(seconds)[50] < 1


def test_request_without_a_run_key_makes_a_second_run(world: World) -> None:
    world.clockwork.run(5)
    (process,) = world.processes
    batch_request, known = BatchRequest("b-late", 1, (RANGE,)), set(world.dagster.runs)
    made = []
    for keyed in (True, True, False):
        process._arrive(batch_request, keyed=keyed)
        made.append(len(set(world.dagster.runs) - known))
    assert made == [1, 1, 2]
