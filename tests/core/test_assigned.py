"""Partitions that have nothing to do cost next to nothing, and are asked for news in their turn."""

from __future__ import annotations

from dagster_rebalance.core import commands as do
from dagster_rebalance.core import events as seen
from dagster_rebalance.core.explain import summary
from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition
from tests.core.world import Member, World, tp


def idle_member(partitions: int) -> tuple[World, Member]:
    """A member with nothing to do."""
    world = World(partitions=partitions)
    for number in range(partitions):
        world.kafka.stored[tp(number)] = OffsetAndMetadata(0)
    member = world.member(owns=partitions)
    world.wait(2, member)
    return world, member


def busy_of(member: Member) -> list[TopicPartition]:
    """The partitions that need a look."""
    return [owned.partition for owned in member.driver.partitions.busy]


def test_idle_partitions_need_no_look() -> None:
    """A member turns ten times a second; with thousands of partitions that was most of a core."""
    world, member = idle_member(3)
    assert busy_of(member) == []
    world.kafka.produce(tp(1), 5)
    world.wait(1.5, member)
    assert busy_of(member) == [tp(1)]
    assert summary(member.driver, world.now) == (
        "owns orders-0..2 (3 partitions), lag 5, 0 runs in flight",
    )
    member.feed(seen.PartitionsLost((tp(1),)))
    assert busy_of(member) == []
    assert set(member.driver.partitions) == {tp(0), tp(2)}


def test_of_very_many_idle_partitions_a_thousand_are_asked_for_news_each_second() -> None:
    """Each has its turn, and those that have work are asked for each time."""
    world, member = idle_member(2_500)
    world.kafka.produce(tp(2_400), 5)
    world.wait(3, member)
    member.done.clear()
    world.wait(3, member)
    looks = [
        command for command in member.given(do.ReadBounds) if isinstance(command, do.ReadBounds)
    ]
    assert len(looks) == 3
    assert all(len(look.partitions) == 1_001 for look in looks)
    assert all(tp(2_400) in look.partitions for look in looks)
    assert {partition for look in looks for partition in look.partitions} == {
        tp(number) for number in range(2_500)
    }
