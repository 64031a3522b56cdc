"""Partitions that have nothing to do cost next to nothing, and are asked for news in their turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.reporting.explain import summary
from tests.core.world import Member, World, tp

if TYPE_CHECKING:
    import pytest

    from dagster_rebalance.core.partitions.owned import PendingWrite


def idle_member(partitions: int) -> tuple[World, Member]:
    """A member with nothing to do."""
    world = World(partitions=partitions)
    for number in range(partitions):
        world.kafka.stored[tp(number)] = OffsetAndMetadata(0)
    member = world.member(owns=partitions)
    world.wait(2, member)
    return world, member


def busy_of(member: Member) -> list[TopicPartition]:
    """Return the busy partitions."""
    return [owned.partition for owned in member.engine.partitions.busy]


def test_idle_partitions_are_not_busy() -> None:
    world, member = idle_member(3)
    assert busy_of(member) == []
    world.kafka.produce(tp(1), 5)
    world.wait(1.5, member)
    assert busy_of(member) == [tp(1)]
    assert summary(member.engine, world.now) == (
        "owns orders-0..2 (3 partitions), lag 5; no run working",
    )
    member.feed(events.PartitionsLost((tp(1),)))
    assert busy_of(member) == []
    assert set(member.engine.partitions) == {tp(0), tp(2)}


def test_bounds_of_idle_partitions_are_read_in_rotation() -> None:
    world, member = idle_member(2_500)
    world.kafka.produce(tp(2_400), 5)
    world.wait(3, member)
    member.done.clear()
    world.wait(3, member)
    looks = [
        command
        for command in member.given(commands.ReadBounds)
        if isinstance(command, commands.ReadBounds)
    ]
    assert len(looks) == 3
    assert all(len(look.partitions) == 1_001 for look in looks)
    assert all(tp(2_400) in look.partitions for look in looks)
    assert {partition for look in looks for partition in look.partitions} == {
        tp(number) for number in range(2_500)
    }


def test_recorded_commit_checks_busy_partitions_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, member = idle_member(200)
    for number in range(3):
        world.kafka.produce(tp(number), 5)
    world.wait(1.5, member)
    for run_id in member.tick(state=RunState.STARTED):
        world.succeed(run_id)
    member.unanswered = {commands.RecordCommit}
    world.wait(1.5, member)
    recorded = member.given(commands.RecordCommit)[:3]
    assert (
        len({record.range for record in recorded if isinstance(record, commands.RecordCommit)}) == 3
    )
    looks: list[TopicPartition] = []
    real = OwnedPartition.commit_write

    def commit_write(self: OwnedPartition, now: float) -> PendingWrite | None:
        looks.append(self.partition)
        return real(self, now)

    monkeypatch.setattr(OwnedPartition, "commit_write", commit_write)
    for record in recorded:
        assert isinstance(record, commands.RecordCommit)
        looks.clear()
        busy = busy_of(member)
        member.engine.handle(events.CommitRecorded(record), world.now)
        assert len(looks) <= len(busy) <= 3
    assert busy_of(member) == []
