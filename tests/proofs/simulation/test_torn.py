"""Runs whose writes are torn, launchers that hang, and replicas, without a schedule."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.model.events import TickArrived
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.core.model.run_snapshot import RunState
from proofs.simulation.clockwork import Violation
from proofs.simulation.coordinator import TOPIC
from proofs.simulation.world import World

RANGE = OffsetRange(TOPIC, 0, 1_000, 1_010)
QUIET = 2
"""A seed whose schedule has no faults."""


@pytest.fixture
def world() -> World:
    """A world without faults but those of the test."""
    return World(QUIET)


def at_work(world: World) -> str:
    """Return a run that works alone on a range."""
    dagster = world.dagster
    run_id = dagster.create("b", (RANGE,))
    dagster._move(run_id, RunState.STARTED, has_started=True)
    dagster.processes[run_id].has_begun = dagster.processes[run_id].is_working = True
    return run_id


def ended(world: World, run_id: str) -> None:
    """A member has ended a run that gave no sign any more."""
    sign = world.dagster.processes[run_id].sign(world.clockwork.now)
    assert world.dagster.end_dead(run_id, sign)
    assert world.dagster.call_over(run_id, sign)


def test_run_killed_between_its_output_and_its_status_has_not_succeeded(
    world: World,
) -> None:
    world.weather.torn = 1.0
    world.weather.assets = ("orders", "totals")
    seen = set()
    for _ in range(40):
        run_id = at_work(world)
        world.dagster._end(run_id)
        run, process = world.dagster.runs[run_id], world.dagster.processes[run_id]
        seen.add((len(run.done), len(run.undone), process.has_finished))
        assert (run.state, process.is_gone) == (RunState.STARTED, True)
        (shown,) = [
            one for one in world.dagster.seen(["b"], with_live=False) if one.run_id == run_id
        ]
        assert shown.is_live
        ended(world, run_id)
        assert world.dagster.runs[run_id].state is RunState.FAILED
    assert seen == {(0, 1, False), (1, 1, False), (2, 0, False), (2, 0, True)}
    assert not any(
        RANGE.start == at for at, _, _ in world.dagster.outputs.done.get(RANGE.topic_partition, ())
    )


def test_process_killed_after_its_first_heartbeat_has_not_begun(world: World) -> None:
    world.weather.torn = 1.0
    run_id = world.dagster.create("b", (RANGE,))
    world.dagster._move(run_id, RunState.STARTED)
    world.dagster._make_check(run_id)
    (shown,) = world.dagster.seen(["b"], with_live=False)
    assert shown.has_begun, "a sign is there"
    world.dagster.mark_ended(run_id, RunState.FAILED)
    (shown,) = world.dagster.seen(["b"], with_live=False)
    assert (shown.has_started, shown.is_over) == (False, True)


def test_refusal_is_read_once_its_run_has_ended(world: World) -> None:
    run_id = at_work(world)
    world.dagster.processes[run_id].has_refused = True
    (shown,) = world.dagster.seen(["b"], with_live=False)
    assert not shown.is_refused
    world.dagster.mark_ended(run_id, RunState.FAILED)
    (shown,) = world.dagster.seen(["b"], with_live=False)
    assert (shown.is_refused, shown.refusal) == (True, "")


def test_member_that_withdraws_a_run_without_its_cancellation_has_withdrawn_it(
    world: World,
) -> None:
    run_id = at_work(world)
    world.dagster.take_back(run_id, only_unstarted=True)
    assert not world.dagster.runs[run_id].is_cancelled_by_member, "it has already started"
    world.dagster.take_back(run_id, only_unstarted=False)
    assert world.dagster.runs[run_id].is_cancelled_by_member
    assert world.dagster.runs[run_id].state is RunState.STARTED


def test_tick_reads_the_mailbox_during_a_turn_of_the_member_loop(world: World) -> None:
    world.clockwork.run(5)
    (process,) = world.processes
    told: list[bool] = []
    take, pumping = process.mailbox.send, world.clockwork.is_waiting

    def tell(event: object) -> None:
        if isinstance(event, TickArrived):
            told.append(pumping(process))
        take(event)  # type: ignore[arg-type]  # it only passes it on

    process.mailbox.send = tell  # type: ignore[method-assign]
    world.weather.stalls = 0.2
    world.clockwork.run(60)
    assert True in told


def test_member_continues_while_a_launcher_hangs(world: World) -> None:
    world.weather.launchers_last_s = 100.0
    world.weather.launchers_hang = 1.0
    while not world.dagster.runs:
        world.clockwork.run(1)
    (process,) = world.processes
    turns = process._turn_began_at
    process.member_loop._canceller.cancel(["r1"])
    assert world.clockwork.hanging
    world.clockwork.run(1.9)
    assert process._turn_began_at > turns
    assert world.clockwork.hanging
    world.clockwork.stop()


def test_replica_that_joins_beside_the_preferred_member_is_a_violation() -> None:
    world = World(QUIET, replicas=True)
    (replicas,) = world._replicas.values()
    world.clockwork.run(40)
    members = {process.incarnation for process in world.processes if not process.is_gone}
    assert len(members) == 1, "the two have settled"
    (left,) = [one for one in replicas._replicas if one.process is None or one.process.is_gone]
    with pytest.raises(Violation, match="joins again although member"):
        replicas._made(left)


def test_hanging_member_is_abandoned_and_leaves_when_it_wakes_up() -> None:
    world = World(QUIET, replicas=True)
    world.clockwork.run(40)
    (hangs,) = [process for process in world.processes if not process.is_gone]
    hangs.hang(30)
    world.clockwork.run(25)
    assert hangs.mailbox.is_abandoned
    assert not hangs.is_gone
    assert [process for process in world.processes if process is not hangs and not process.is_gone]
    world.clockwork.run(10)
    assert hangs.is_gone


def test_clocks_of_members_runs_and_operators_are_independent() -> None:
    world = World(QUIET, replicas=True, orders=True)
    world.clockwork.run(10)
    assert len({process.clock_base for process in world.processes}) == len(world.processes) > 1
    assert len({process.signs_from for process in world.dagster.processes.values()}) > 1
    for _ in range(5):
        world.people.pause(TopicPartition(TOPIC, 0))
    given = world.dagster.orders
    assert [order.at for order in given] != sorted(order.at for order in given)
    assert len({world.dagster.ordered_at(order) for order in given}) == 1
