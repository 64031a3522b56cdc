"""Holds that meet a second rebalance, their limit, or their own partitions again."""

from __future__ import annotations

from dataclasses import replace

from dagster_rebalance.core.batches.engine_settings import DeadlinePolicy
from dagster_rebalance.core.model import commands
from dagster_rebalance.core.model.commands import HoldOutcome
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.core.world import World, tp
from tests.kafka.consumers import Listener, owner
from tests.scenarios.parts import SETTINGS, assign, at_work, outputs, revoke, start_all

P2, P3 = TopicPartition("orders", 2), TopicPartition("orders", 3)
HAND_OVER = replace(SETTINGS, on_deadline=DeadlinePolicy.RELEASE)


def test_revoke_and_assignment_in_one_poll_are_reported_in_order() -> None:
    group = FakeGroup({"orders": 4})
    listener = Listener()
    blue, green = owner(group, listener), group.member()
    green.subscribe(["orders"])
    green.poll(0.1)
    blue.poll(0.1)
    assert blue.get_to_be_revoked_partitions() == {P2, P3}
    green.close()
    listener.calls.clear()
    blue.poll(0.1)
    assert listener.calls == [("revoked", {P2, P3}), ("assigned", {P2, P3})]
    assert blue.assignment() == {tp(number) for number in range(4)}


def test_hundreds_of_reassigned_partitions_are_all_restored() -> None:
    world = World(partitions=300)
    member = world.member(owns=300, settings=SETTINGS)
    before = {partition: owned.epoch for partition, owned in member.engine.partitions.items()}
    revoke(member, *range(300))
    assign(member, *range(300))
    world.wait(2, member)
    assert all(
        owned.epoch > before[partition] for partition, owned in member.engine.partitions.items()
    )
    assert all(owned.phase.may_plan for owned in member.engine.partitions.values())
    assert len(member.engine.partitions) == 300
    assert [receipt.outcome for receipt in member.receipts] == [HoldOutcome.NOTHING_TO_DO]


def test_second_revoke_during_a_hold_has_its_own_limit_and_receipt() -> None:
    world, member, (slow, quick) = at_work(2)
    revoke(member, 0)
    world.wait(10, member)
    revoke(member, 1)
    world.succeed(quick)
    world.wait(1, member)
    assert world.released_by == [(member, (tp(1),))]
    assert member.engine.held == {tp(0)}
    world.wait(20, member)
    assert world.dagster.runs[slow].state is RunState.CANCELING, (
        "cancelled at the deadline of the first request"
    )
    assert world.released_by[1:] == [(member, (tp(0),))]
    assert [(receipt.outcome, receipt.partitions) for receipt in member.receipts] == [
        (HoldOutcome.DRAINED, (tp(1),)),
        (HoldOutcome.DEADLINE, (tp(0),)),
    ]


def test_hold_at_its_limit_commits_drained_ranges_and_hands_over_the_rest() -> None:
    world, member, (first, second, stuck) = at_work(3)
    revoke(member, 0, 1, 2)
    world.succeed(first)
    world.succeed(second)
    world.wait(2, member)
    assert sorted(world.kafka.commits) == [(tp(0), 100), (tp(1), 100)], "long before the limit"
    assert world.released_by == []
    world.wait(29, member)
    (receipt,) = member.receipts
    assert (receipt.outcome, receipt.handed_over) == (HoldOutcome.DEADLINE, (tp(2),))
    assert receipt.committed == {tp(0): 100, tp(1): 100}
    assert stuck in receipt.run_ids
    assert world.released_by == [(member, (tp(0), tp(1), tp(2)))]


def test_run_that_ends_after_the_release_is_committed_only_by_the_next_owner() -> None:
    world, member, (run_id,) = at_work(settings=HAND_OVER)
    revoke(member, 0)
    world.wait(25, member)
    assert world.released_by == [(member, (tp(0),))]
    writes = len(member.given(commands.WriteOffsets))
    world.succeed(run_id)
    world.wait(10, member)
    assert len(member.given(commands.WriteOffsets)) == writes
    assert world.kafka.commits == []
    heir = world.member(owns=1, settings=SETTINGS)
    world.wait(2, heir)
    assert world.kafka.commits == [(tp(0), 100)]
    assert outputs(world) == {(0, 0, 100): 1}


def test_run_of_an_earlier_ownership_is_adopted_when_its_partition_returns() -> None:
    """The claim leads back to the run that is still live."""
    world, member, (run_id,) = at_work(settings=HAND_OVER)
    revoke(member, 0)
    world.wait(25, member)
    assign(member, 0)
    world.kafka.produce(tp(0), 50)
    world.wait(5, member)
    assert member.tick() == [], "neither its range nor later records"
    world.succeed(run_id)
    world.wait(2, member)
    assert world.kafka.commits == [(tp(0), 100)]
    (behind,) = start_all(world, member)
    assert [range_.start for range_ in world.dagster.runs[behind].ranges] == [100]


def test_runs_cancelled_by_holds_never_stop_a_partition() -> None:
    world = World(records=100)
    member = world.member(owns=1, settings=SETTINGS)
    for _ in range(2 * SETTINGS.max_attempts):
        world.wait(1.25, member)
        (run_id,) = member.tick()
        world.wait(1, member)
        revoke(member, 0)
        world.wait(1, member)
        assert world.dagster.runs[run_id].state is RunState.CANCELED
        assign(member, 0)
    assert len(start_all(world, member)) == 1
    assert member.shown == []
    assert world.kafka.claims(0) == [(100, "b1")]


def test_attempts_count_per_batch_across_rebalances() -> None:
    world, member, (run_id,) = at_work()
    for _ in range(SETTINGS.max_attempts - 1):
        world.dagster.move(run_id, RunState.FAILED)
        world.wait(1.25, member)
        (run_id,) = start_all(world, member)
    revoke(member, 0)
    world.dagster.move(run_id, RunState.FAILED)
    world.wait(1, member)
    heir = world.member(owns=1, settings=SETTINGS)
    assert len(heir.shown) == 1, "its last attempt was used up by the owner before"
    world.succeed(world.dagster.add("b1", world.dagster.runs[run_id].ranges))
    world.kafka.produce(tp(0), 50)
    world.wait(heir.engine.settings.recheck_s + 2, heir)
    (again,) = start_all(world, heir)
    world.dagster.move(again, RunState.FAILED)
    world.wait(2, heir)
    assert [batch_request.attempt for batch_request in heir.engine.batch_requests] == [2], (
        "the count restarts with the next batch"
    )
