"""Partitions that have nothing to do cost next to nothing, and are asked for news in their turn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.offsets import Bounds, OffsetAndMetadata, TopicPartition
from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.core.partitions.assigned import AssignedPartitions, Role
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.reporting.explain import summary
from tests.core.engine.test_quiet import SETTINGS, commands_of
from tests.core.world import Member, World, tp

if TYPE_CHECKING:
    from dagster_rebalance.core.partitions.owned import PendingWrite

JOINED = replace(EngineSettings(), limits=BatchLimits(max_ranges_per_run=50), record_every_s=600.0)


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
    member.unanswered = {commands.RecordCommits}
    world.wait(1.5, member)
    issued, *_ = member.given(commands.RecordCommits)
    assert isinstance(issued, commands.RecordCommits)
    recorded = issued.commits
    assert len({record.range for record in recorded}) == 3
    looks: list[TopicPartition] = []
    real = OwnedPartition.commit_write

    def commit_write(self: OwnedPartition, now: float) -> PendingWrite | None:
        looks.append(self.partition)
        return real(self, now)

    monkeypatch.setattr(OwnedPartition, "commit_write", commit_write)
    for record in recorded:
        looks.clear()
        busy = busy_of(member)
        member.engine.handle(events.CommitsRecorded((record,)), world.now)
        assert len(looks) <= len(busy) <= 3
    assert busy_of(member) == []


def test_commit_with_records_waiting_elsewhere_checks_its_partition_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(records=5, partitions=50)
    member = world.member(owns=50, settings=JOINED)
    for _ in range(2):
        for run_id in member.tick(state=RunState.STARTED):
            world.succeed(run_id)
        world.wait(1.5, member)
        for number in range(50):
            world.kafka.produce(tp(number), 5)
        world.wait(1.5, member)
    for run_id in member.tick(state=RunState.STARTED):
        world.succeed(run_id)
    world.wait(1.5, member)
    waiting = [one for one in member.engine.partitions.values() if one.unrecorded]
    assert len(waiting) == 50
    looks: list[TopicPartition] = []
    monkeypatch.setattr(
        OwnedPartition, "commit_write", lambda self, _now: looks.append(self.partition)
    )
    member.engine.handle(events.BoundsRead({tp(7): Bounds(0, 99)}), world.now)
    assert looks == [tp(7)]


@pytest.mark.parametrize("seed", range(3))
def test_indices_after_a_story_are_those_of_the_partitions(seed: int) -> None:
    engine, _ = commands_of(seed, SETTINGS["letters"], Engine)
    anew = AssignedPartitions()
    anew.update(engine.partitions)
    for role in Role:
        assert engine.partitions.of(role) == anew.of(role)
    claimed = engine.claimed
    assert engine.partitions.claimed_by(claimed) == anew.claimed_by(claimed)


def test_set_of_assigned_partitions_changes_only_with_the_assignment() -> None:
    member = World(records=5, partitions=3).member(owns=2)
    partitions = member.engine.partitions
    assigned, names = partitions.assigned, partitions.names
    partitions[tp(0)] = partitions[tp(0)]._replace(backlog_since=1.0)
    assert partitions.assigned is assigned == {tp(0), tp(1)}
    assert names == "orders-0, orders-1"
    del partitions[tp(0)]
    assert partitions.assigned == {tp(1)}
    assert partitions.names == "orders-1"


def test_news_in_bounds_are_those_that_can_change_a_partition() -> None:
    world, member = idle_member(3)
    partitions = member.engine.partitions
    world.kafka.produce(tp(1), 5)
    world.wait(1.5, member)
    read = {partition: owned.bounds or Bounds(0, 0) for partition, owned in partitions.items()}
    assert partitions.news_in(read) == [(tp(1), read[tp(1)])]
    assert partitions.news_in({tp(0): Bounds(0, 1)}) == [(tp(0), Bounds(0, 1))]


def test_partition_that_only_lacks_its_record_is_done_with_its_bounds() -> None:
    world, member = idle_member(1)
    member.unanswered = {commands.RecordCommits}
    world.kafka.produce(tp(0), 5)
    world.wait(1.5, member)
    for run_id in member.tick(state=RunState.STARTED):
        world.succeed(run_id)
    world.wait(3, member)
    owned = member.engine.partitions[tp(0)]
    assert owned.unrecorded
    assert owned.bounds is not None
    assert owned.is_done_with_bounds
    assert not owned._replace(bounds=replace(owned.bounds, leader_epoch=7)).is_done_with_bounds


def test_equal_bounds_change_no_idle_partition() -> None:
    world, member = idle_member(1)
    before = member.engine.partitions[tp(0)]
    assert before.bounds is not None
    member.engine.handle(events.BoundsRead({tp(0): replace(before.bounds)}), world.now)
    assert member.engine.partitions[tp(0)] is before


def test_sets_of_held_partitions_are_the_same_until_a_hold_begins() -> None:
    world = World(records=5, partitions=3)
    member = world.member(owns=3)
    member.tick(state=RunState.STARTED)
    engine = member.engine
    assert engine.given_up == engine.held == frozenset()
    member.feed(events.RevokeRequested((tp(0),)))
    given_up, revoked = engine.given_up, engine.held
    assert given_up == revoked == {tp(0)}
    world.wait(3, member)
    assert engine.given_up is given_up
    assert engine.held is revoked
    member.feed(events.LeaveRequested("over"))
    assert engine.given_up == {tp(0), tp(1), tp(2)}
    assert engine.held == {tp(0)}
