"""Members that were fenced and do not know it, and runs that start where another one works."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.commands import HoldOutcome
from dagster_rebalance.core.model.events import LostReason
from dagster_rebalance.core.model.run_snapshot import RunState
from tests.core.world import World, tp
from tests.orchestration.bench import Bench, Status
from tests.scenarios.parts import SETTINGS, assign, at_work, outputs, revoke, start_all

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """Return an instance in memory: the member loop never opens another one."""
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def test_zombie_requests_no_runs_because_its_claim_is_refused() -> None:
    world = World(partitions=1)
    zombie = world.member(owns=1, settings=SETTINGS)
    zombie.is_fenced = True
    world.kafka.produce(tp(0), 100)
    world.wait(10, zombie)
    assert zombie.given(commands.WriteOffsets), "it does try"
    assert zombie.tick() == []
    assert world.dagster.runs == {}


def test_fenced_member_requests_nothing_before_and_after_it_detects_that(
    instance: dg.DagsterInstance,
) -> None:
    bench = Bench(instance, records=0)
    bench.until(
        lambda: (
            bench.engine.partitions
            and all(owned.phase.may_plan for owned in bench.engine.partitions.values())
        )
    )
    heir = bench.joined_by_another()
    bench.group.fence(bench.member)
    bench.member.pending_loss = None  # no heartbeat has told it yet
    bench.group.produce(tp(0), 10)
    bench.consumer.writes.clear()
    for _ in range(20):
        heir.poll(0)
        bench.turn()
        assert bench.mailbox.mail.batch_requests == ()
    assert bench.consumer.writes, "it does try to claim"
    bench.member.pending_loss = LostReason.SESSION
    for _ in range(20):
        heir.poll(0)
        bench.turn()
        assert bench.mailbox.mail.batch_requests == ()
    assert bench.engine.heard(events.PartitionsLost)
    assert instance.get_runs_count() == 0


def test_zombie_and_next_owner_request_the_same_run_key() -> None:
    world = World(records=100)
    zombie = world.member(owns=1, settings=SETTINGS)
    zombie.is_fenced = True
    heir = world.member(owns=1, settings=SETTINGS)
    assert zombie.engine.batch_requests == heir.engine.batch_requests != ()
    (run_id,) = heir.tick()
    assert zombie.tick() == []
    assert world.start(run_id) is None
    world.succeed(run_id)
    world.wait(2, heir)
    assert zombie.tick() == []
    assert outputs(world) == {(0, 0, 100): 1}


def test_run_launched_after_its_range_was_committed_refuses_itself() -> None:
    world, member, (run_id,) = at_work()
    late = world.dagster.add("b1", world.dagster.runs[run_id].ranges, RunState.WAITING)
    world.succeed(run_id)
    world.wait(2, member)
    refused = world.start(late)
    assert refused is not None
    assert "is already committed" in refused
    assert outputs(world) == {(0, 0, 100): 1}


def test_run_resumed_after_its_batch_was_done_again_refuses_itself() -> None:
    """Dagster resumes a run after its batch went to another one."""
    for ends_first in (False, True):
        world, member, (dead,) = at_work()
        world.dagster.move(dead, RunState.FAILED)
        world.wait(2, member)
        (successor,) = start_all(world, member)
        if ends_first:
            world.succeed(successor)
        assert world.start(dead) is not None
        if not ends_first:
            world.succeed(successor)
        world.wait(2, member)
        assert outputs(world) == {(0, 0, 100): 1}
        assert world.kafka.commits == [(tp(0), 100)]


def test_start_check_uses_the_claim_at_the_start_of_the_run() -> None:
    world = World(records=100)
    member = world.member(owns=1, settings=SETTINGS)
    (run_id,) = member.tick()
    del world.kafka.stored[tp(0)]
    refused = world.start(run_id)
    assert refused is not None
    assert "is not claimed" in refused
    assert outputs(world) == {}


def test_at_most_one_of_two_live_runs_of_a_batch_succeeds() -> None:
    """The start checks run in every order. If both runs refuse, the owner requests a third one."""
    steps = [("a", "start"), ("a", "check"), ("b", "start"), ("b", "check")]
    orders = [(0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1), (2, 0, 1, 3), (2, 0, 3, 1), (2, 3, 0, 1)]
    for order in orders:
        world = World(records=100)
        member = world.member(owns=1, settings=SETTINGS)
        (first,) = member.tick()
        runs = {
            "a": first,
            "b": world.dagster.add("b1", world.dagster.runs[first].ranges, RunState.WAITING),
        }
        working = set()
        for name, step in (steps[index] for index in order):
            if step == "start":
                world.dagster.move(runs[name], RunState.STARTED)
            elif world.check(runs[name]) is None:
                working.add(name)
        assert len(working) <= 1, order
        for name in working:
            world.succeed(runs[name])
        world.wait(2, member)
        for run_id in [] if working else start_all(world, member):
            world.succeed(run_id)
        world.wait(2, member)
        assert outputs(world) == {(0, 0, 100): 1}, order


def test_superseded_and_lost_holds_never_send_their_release() -> None:
    for reason, outcome in (
        (LostReason.SUPERSEDED, HoldOutcome.SUPERSEDED),
        (LostReason.FENCED, HoldOutcome.LOST),
    ):
        world, member, (run_id,) = at_work()
        revoke(member, 0)
        member.feed(events.PartitionsLost((tp(0),), reason))
        assign(member, 0)
        world.succeed(run_id)
        world.wait(60, member)
        assert world.released_by == []
        assert [receipt.outcome for receipt in member.receipts] == [outcome]
        assert tp(0) in member.engine.partitions
        assert world.kafka.commits == [(tp(0), 100)], "by the new ownership"


def test_member_works_again_after_a_loss_on_an_idle_topic(
    instance: dg.DagsterInstance,
) -> None:
    bench = Bench(instance, records=0)
    bench.until(lambda: bench.engine.partitions)
    bench.group.fence(bench.member)
    assert bench.member.pending_loss is LostReason.SESSION
    bench.until(lambda: bench.engine.heard(events.PartitionsLost) and bench.engine.partitions)
    bench.group.produce(tp(0), 10)
    bench.batch_requests()
    run = bench.run(Status.STARTED)
    bench.turn(5)
    bench.succeed(run)
    bench.until(bench.materialised)
    assert bench.offset() == 10


def test_partition_assigned_and_revoked_in_one_poll_is_released_at_once(
    instance: dg.DagsterInstance,
) -> None:
    bench = Bench(instance, partitions=2, records=0)
    bench.until(lambda: len(bench.engine.partitions) == 2)
    bench.group.add_partitions("orders", 4)
    other = bench.joined_by_another()
    before = bench.group.clock()
    bench.until(lambda: other.poll(0) == [] and len(other.assignment()) == 2)
    assert bench.group.clock() - before < 0.5
    assert bench.engine.partitions.keys() == bench.consumer.assignment()
    assert not bench.engine.held
    assert bench.consumer.assignment().isdisjoint(other.assignment())
