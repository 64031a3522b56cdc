"""Writes that Kafka refuses for a reason that waiting does not mend."""

from __future__ import annotations

from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.reporting.explain import explain_partition
from tests.core.world import World, tp


def test_a_partition_goes_on_when_a_refused_write_is_taken_after_all() -> None:
    """The reason is shown once, and whoever mends it need not tell anybody.

    A late or foreign refusal changes nothing.
    """
    world = World(records=10)
    member = world.member()
    member.unanswered = {commands.WriteOffsets}
    member.fails = {commands.WriteOffsets}
    member.feed(events.PartitionsAssigned((tp(0),)))
    (asked,) = member.given(commands.WriteOffsets)
    assert isinstance(asked, commands.WriteOffsets)
    (write,) = asked.writes
    for number in range(2):
        member.feed(
            events.OffsetsWritten((), (), ((write, f"grant the ACL READ, asked {number} times"),))
        )
    member.feed(
        events.OffsetsWritten(
            (), (), ((commands.OffsetWrite(tp(0), 1, None, write.new.__class__(7)), "late"),)
        )
    )
    member.feed(
        events.OffsetsWritten(
            (), (), ((commands.OffsetWrite(tp(5), 1, None, write.new), "foreign"),)
        )
    )
    assert [reason for _, reason in member.shown] == [
        (
            "orders-0: Kafka refuses to store its offset: grant the ACL READ, asked 0 times. It is "
            "tried again every few seconds"
        )
    ]
    assert member.engine.partitions[tp(0)].phase is Phase.STOPPED
    world.wait(9, member)
    assert len(member.given(commands.WriteOffsets)) == 1
    world.wait(2, member)
    assert len(member.given(commands.WriteOffsets)) == 2
    member.fails, member.unanswered = set(), set()
    world.wait(11, member)
    assert member.engine.partitions[tp(0)].phase is Phase.OWNED
    assert [reason for _, reason in member.shown][1:] == [""]
    member.tick()
    assert world.kafka.claims(0) == [(10, "b1")]


def test_a_write_that_is_asked_for_again_and_again_is_said_to_wait_since_the_first_time() -> None:
    """Each retry made it look as if it had just begun."""
    world = World(records=10)
    member = world.member()
    member.fails = {commands.WriteOffsets}
    member.feed(events.PartitionsAssigned((tp(0),)))
    world.wait(30, member)
    assert "has waited 30.0 s for Kafka's confirmation" in explain_partition(
        member.engine.partitions[tp(0)], world.now
    )
