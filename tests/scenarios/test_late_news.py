"""Late ticks, late answers of Dagster, and failures."""

from __future__ import annotations

from dataclasses import replace

from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.core.model.topics import StartFrom
from tests.core.world import World, tp
from tests.scenarios.parts import SETTINGS, assign, at_work, outputs, revoke, start_all

TEN_MINUTES_S = 600.0


def test_missing_ticks_shorter_than_the_lease_do_not_affect_work_in_flight() -> None:
    world, member, runs = at_work(2, settings=replace(SETTINGS, lease_s=60))
    world.wait(30, member)
    for run_id in runs:
        world.succeed(run_id)
    world.wait(20, member)
    assert member.engine.leaving is None
    assert sorted(world.kafka.commits) == [(tp(0), 100), (tp(1), 100)]
    assert len(world.dagster.recorded) == 2
    assert set(member.engine.partitions) == {tp(0), tp(1)}


def test_ticks_missing_for_ten_minutes_cost_the_membership_but_no_work() -> None:
    world, member, (run_id,) = at_work(settings=replace(SETTINGS, lease_s=60))
    world.wait(65, member)
    assert member.left is None, "its run is at work"
    world.succeed(run_id)
    world.wait(TEN_MINUTES_S - 65, member)
    assert member.left is not None
    assert len(member.given(commands.LeaveGroup)) == 1
    world.kafka.produce(tp(0), 10)
    after = world.member(owns=1, settings=SETTINGS)
    for again in start_all(world, after):
        world.succeed(again)
    world.wait(2, after)
    assert outputs(world) == {(0, 0, 100): 1, (0, 100, 110): 1}
    assert world.kafka.commits == [(tp(0), 100), (tp(0), 110)]


def test_success_read_ten_minutes_late_is_committed_once() -> None:
    world, member, (run_id,) = at_work()
    member.fails.add(commands.ReadRuns)
    world.succeed(run_id)
    world.wait(TEN_MINUTES_S, member, step=1)
    assert world.kafka.commits == []
    assert member.tick() == [], "a run without a known failure is not requested again"
    member.fails.clear()
    world.wait(3, member)
    assert world.kafka.commits == [(tp(0), 100)]
    assert len(world.dagster.recorded) == 1


def test_success_read_after_a_hand_over_is_not_committed_by_the_old_owner() -> None:
    world, member, (run_id,) = at_work()
    (asked,) = {type(command): command for command in member.given(commands.ReadRuns)}.values()
    assert isinstance(asked, commands.ReadRuns)
    member.feed(events.PartitionsLost((tp(0),)))
    world.succeed(run_id)
    member.feed(events.RunsRead(asked.batch_ids, tuple(world.dagster.runs.values())))
    world.wait(5, member)
    assert world.kafka.commits == []
    world.member(owns=1, settings=SETTINGS)
    assert world.kafka.commits == [(tp(0), 100)]


def test_failed_range_blocks_commits_after_it_until_it_succeeds() -> None:
    limits = BatchLimits(max_records_per_range=10, max_claims_per_partition=3, max_ranges_per_run=1)
    world = World(records=30)
    member = world.member(owns=1, settings=replace(SETTINGS, limits=limits, max_attempts=5))
    runs: dict[int, str] = {}
    for _ in range(5):
        for run_id in start_all(world, member):
            runs[world.dagster.runs[run_id].ranges[0].start] = run_id
    assert sorted(runs) == [0, 10, 20]
    world.succeed(runs[10])
    world.succeed(runs[20])
    world.dagster.move(runs[0], RunState.FAILED)
    world.wait(5, member)
    assert world.kafka.commits == []
    (again,) = start_all(world, member)
    world.succeed(again)
    world.wait(5, member)
    assert world.kafka.commits == [(tp(0), 10), (tp(0), 20), (tp(0), 30)]
    assert set(outputs(world).values()) == {1}


def test_lag_of_a_stopped_partition_keeps_growing() -> None:
    world, member, (run_id,) = at_work(settings=replace(SETTINGS, max_attempts=1))
    world.dagster.move(run_id, RunState.FAILED)
    world.wait(2, member)
    assert len(member.shown) == 1, "stopped"
    before = member.engine.partitions[tp(0)].lag
    world.kafka.produce(tp(0), 500)
    world.wait(2, member)
    assert member.engine.partitions[tp(0)].lag == before + 500


def test_rolling_deploy_processes_each_record_once() -> None:
    world = World(records=20, partitions=6)
    members = {
        0: world.member(settings=SETTINGS),
        1: world.member(settings=SETTINGS),
        2: world.member(settings=SETTINGS),
    }
    for seat, member in members.items():
        assign(member, 2 * seat, 2 * seat + 1)
    running: list[str] = []
    for seat in (0, 1, 2):
        for member in members.values():
            running += start_all(world, member)
        old = members[seat]
        old.feed(events.LeaveRequested("a deploy"))
        for number in range(6):
            world.kafka.produce(tp(number), 10)
        world.wait(3, *members.values())
        assert old.left is None, "its runs are at work"
        while running:
            world.succeed(running.pop())
        world.wait(3, *members.values())
        assert old.left == "a deploy"
        members[seat] = world.member(settings=SETTINGS)
        assign(members[seat], 2 * seat, 2 * seat + 1)
    for _ in range(3):
        for member in members.values():
            for run_id in start_all(world, member):
                world.succeed(run_id)
        world.wait(3, *members.values())
    assert [world.kafka.offset(number) for number in range(6)] == [50] * 6
    assert set(outputs(world).values()) == {1}
    assert sum(until - start for _, start, until in outputs(world)) == 6 * 50


def test_group_that_starts_at_the_end_starts_there_once() -> None:
    settings = replace(SETTINGS, start_from=StartFrom.LATEST)
    world = World(records=100)
    member = world.member(owns=1, settings=settings)
    revoke(member, 0)
    world.kafka.produce(tp(0), 50)
    heir = world.member(owns=1, settings=settings)
    (run_id,) = start_all(world, heir)
    world.succeed(run_id)
    assert outputs(world) == {(0, 100, 150): 1}
