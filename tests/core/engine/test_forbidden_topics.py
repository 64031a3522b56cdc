"""Kafka refuses to answer for a topic: its partitions stop, and hold nothing up."""

from __future__ import annotations

from dagster_rebalance.core.model import events
from dagster_rebalance.core.model.receipt import Outcome
from dagster_rebalance.core.partitions.state_machine import Phase
from tests.core.world import World, tp

REASON = "reading offsets failed: grant the ACL READ"


def test_a_partition_that_may_not_be_read_stops_with_the_reason_and_goes_on_by_itself() -> None:
    """The other partition goes on meanwhile."""
    world = World(records=10, partitions=2)
    member = world.member()
    world.kafka.forbidden[tp(0)] = REASON
    member.feed(events.PartitionsAssigned((tp(0), tp(1))))
    world.wait(1, member)
    phases = {p: owned.phase for p, owned in member.engine.partitions.items()}
    assert phases == {tp(0): Phase.STOPPED, tp(1): Phase.OWNED}
    assert member.shown == [(tp(0), f"orders-0: {REASON}")]
    world.wait(25, member)
    assert len(member.shown) == 1, "looking again finds the same, which is no news"
    world.kafka.forbidden.clear()
    world.wait(12, member)
    assert member.engine.partitions[tp(0)].phase is Phase.OWNED
    assert [reason for _, reason in member.shown][1:] == [""]


def test_an_owned_partition_stops_when_its_bounds_may_not_be_read_any_more() -> None:
    """Without records to claim, no write would find out."""
    world = World(partitions=2)
    member = world.member()
    member.feed(events.PartitionsAssigned((tp(0), tp(1))))
    world.wait(1, member)
    assert member.engine.partitions[tp(0)].phase is Phase.OWNED
    world.kafka.forbidden[tp(0)] = REASON
    world.wait(12, member)
    assert member.shown == [(tp(0), f"orders-0: {REASON}")]
    assert member.engine.partitions[tp(1)].phase is Phase.OWNED
    member.feed(events.BoundsRead({}, frozenset({tp(0), tp(7)})))
    assert member.engine.partitions[tp(0)].phase is Phase.STOPPED


def test_a_hold_does_not_wait_for_a_commit_that_kafka_refuses() -> None:
    """The claim stays for the next owner, and the other partitions of the hold need not wait."""
    world = World(records=10)
    member = world.member()
    member.feed(events.PartitionsAssigned((tp(0),)))
    world.wait(1, member)
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    member.feed(events.RevokeRequested((tp(0),)))
    world.wait(1, member)
    assert member.engine.partitions[tp(0)].phase is Phase.DRAINING
    world.kafka.forbidden[tp(0)] = REASON
    world.succeed(run_id)
    world.wait(3, member)
    (receipt,) = member.receipts
    assert receipt.outcome is Outcome.DRAINED
    assert receipt.handed_over == (tp(0),)
    assert world.kafka.claims(0) == [(10, "b1")]
