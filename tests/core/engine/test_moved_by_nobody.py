"""Offsets that vanished, went back or belong to another log.

No partition goes on without a person's word.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.batches.settings import EngineSettings
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.offsets import Bounds, Log, OffsetAndMetadata
from dagster_rebalance.core.model.start_position import StartFrom
from dagster_rebalance.core.partitions.state_machine import Phase
from tests.core.world import Member, World, span, tp

SETTINGS = EngineSettings(lease_s=100_000.0)


def at_the_end(*, elections: int = 1, settings: EngineSettings = SETTINGS) -> tuple[World, Member]:
    """A member that has committed all of the 20 offsets of orders-0."""
    world = World()
    world.kafka.topic_id = "id-1"
    for _ in range(elections):
        world.kafka.elect(0)
    member = world.member(owns=1, settings=settings)
    world.kafka.produce(tp(0), 20)
    batch(world, member)
    assert world.kafka.offset(0) == 20
    return world, member


def batch(world: World, member: Member) -> None:
    """What is there is claimed, done and committed."""
    world.wait(5, member)
    for run_id in member.tick():
        assert world.start(run_id) is None
        world.succeed(run_id)
    world.wait(5, member)


def rest(world: World, member: Member) -> None:
    """Time passes, with ticks, until a stopped partition was looked at again."""
    for _ in range(6):
        member.feed(events.TickArrived())
        world.wait(5, member)


def is_stopped(member: Member) -> bool:
    """Whether orders-0 is stopped."""
    return member.engine.partitions[tp(0)].phase is Phase.STOPPED


def move(world: World, offset: int) -> None:
    """A person commits an offset with Kafka's tools."""
    world.kafka.stored[tp(0)] = OffsetAndMetadata(offset)


@pytest.mark.parametrize("start_from", list(StartFrom))
def test_an_offset_that_vanished_stops_the_partition_until_a_person_commits_one(
    start_from: StartFrom,
) -> None:
    """Kafka drops the offsets of a group whose sensors were off for a week."""
    world, _ = at_the_end(settings=replace(SETTINGS, start_from=start_from))
    del world.kafka.stored[tp(0)]
    world.kafka.produce(tp(0), 10)
    member = world.member(owns=1, settings=replace(SETTINGS, start_from=start_from))
    rest(world, member)
    assert is_stopped(member)
    assert world.kafka.offset(0) is None, "nothing was written"
    move(world, 20)
    rest(world, member)
    assert not is_stopped(member)
    assert world.kafka.claims(0) == [(30, "b2")]


def test_a_group_whose_records_were_wiped_begins_anew() -> None:
    """A group id that is used again on purpose: the person's word is to wipe the asset."""
    world, _ = at_the_end()
    del world.kafka.stored[tp(0)]
    member = world.member(owns=1)
    assert is_stopped(member)
    world.dagster.recorded.clear()
    rest(world, member)
    assert world.kafka.offset(0) == 0


def test_offsets_that_vanish_under_a_member_stop_the_partition_too() -> None:
    """The offset vanishes while the member owns the partition.

    The topic was deleted and made again, or the group's offsets were deleted.
    """
    world, member = at_the_end()
    del world.kafka.stored[tp(0)]
    world.kafka.produce(tp(0), 10)
    rest(world, member)
    assert is_stopped(member)
    assert world.kafka.offset(0) is None


@pytest.mark.parametrize("elections", [0, 1])
def test_a_truncated_log_that_grows_again_stays_stopped(elections: int) -> None:
    """The records produced since the truncation have offsets that the group has passed.

    To go on would lose them.
    """
    world, member = at_the_end(elections=elections)
    world.kafka.bounds[tp(0)] = replace(world.kafka.bounds[tp(0)], until=15)
    if elections:
        world.kafka.elect(0, cut_at=15)
    rest(world, member)
    assert is_stopped(member)
    world.kafka.produce(tp(0), 30)
    rest(world, member)
    assert is_stopped(member)
    move(world, 15)
    rest(world, member)
    assert world.kafka.claims(0) == [(45, "b2")]


def test_a_dip_that_nobody_looked_at_stops_the_partition() -> None:
    """It lies between two looks, or in a hand-over; the bounds look as if nothing had happened."""
    world, member = at_the_end()
    world.kafka.elect(0, cut_at=15)
    world.kafka.produce(tp(0), 30)
    rest(world, member)
    assert is_stopped(member)
    other = world.member(owns=1)
    assert is_stopped(other)
    assert (
        "the group is at offset 20, but the log lost records before that offset"
        in other.engine.partitions[tp(0)].stop_reason
    )


def test_a_dip_below_a_claim_stops_the_partition() -> None:
    """The run may have read records that are gone.

    The new records behind the claim's end would be passed over.
    """
    world, member = at_the_end()
    world.kafka.produce(tp(0), 10)
    world.wait(5, member)
    world.kafka.elect(0, cut_at=25)
    world.kafka.produce(tp(0), 30)
    world.wait(5, member)
    assert is_stopped(member)


def test_a_clean_election_changes_nothing_but_the_stored_epoch() -> None:
    """Brokers restart all the time."""
    world, member = at_the_end()
    world.kafka.elect(0)
    world.wait(5, member)
    assert not member.shown
    assert decode(world.kafka.stored[tp(0)]).log == Log("id-1", 2)
    world.kafka.produce(tp(0), 10)
    batch(world, member)
    assert world.kafka.offset(0) == 30


def test_a_claim_is_not_planned_on_the_bounds_of_a_new_leader() -> None:
    """Its end would be stored beside an epoch in which the log never reached it."""
    world, member = at_the_end()
    member.fails.add(commands.ReadStoredOffsets)
    world.kafka.elect(0)
    world.kafka.produce(tp(0), 10)
    world.wait(5, member)
    assert world.kafka.claims(0) == []


def test_nothing_is_planned_on_a_new_leader_when_a_stop_ends() -> None:
    """A stopped partition is not taken in anew at each election, so this may be the first look."""
    _, member = at_the_end()
    owned = member.engine.partitions[tp(0)]
    for epoch, is_planned in ((1, True), (2, False)):
        grown = replace(owned, bounds=Bounds(0, 40, epoch), backlog_since=0.0)
        assert (grown.backlog is not None) is is_planned


def test_a_new_leader_is_looked_into_when_no_write_is_under_way() -> None:
    """A claim whose answer is lost is given again, with what it said of the log."""
    world, member = at_the_end()
    member.unanswered.add(commands.WriteOffsets)
    world.kafka.produce(tp(0), 10)
    world.wait(5, member)
    world.kafka.elect(0)
    world.wait(5, member)
    assert member.engine.partitions[tp(0)].pending is not None
    member.unanswered.clear()
    world.wait(5, member)
    assert decode(world.kafka.stored[tp(0)]).log == Log("id-1", 2)
    assert world.kafka.claims(0) == [(30, "b2")]


def test_a_topic_that_was_made_again_stops_the_partition() -> None:
    """Its records have the offsets of others, and the ranges of others as keys of their output."""
    world, _ = at_the_end()
    world.kafka.topic_id = "id-2"
    world.kafka.produce(tp(0), 30)
    member = world.member(owns=1)
    assert is_stopped(member)
    assert "deleted and made again" in member.engine.partitions[tp(0)].stop_reason


def test_a_first_position_says_which_log_it_belongs_to() -> None:
    """A topic may be made again before anything was committed."""
    world = World(records=20)
    world.kafka.topic_id = "id-1"
    member = world.member(settings=replace(SETTINGS, start_from=StartFrom.LATEST))
    member.feed(events.PartitionsAssigned((tp(0),)))
    assert decode(world.kafka.stored[tp(0)]).log == Log("id-1")
    assert world.kafka.offset(0) == 20


def test_a_commit_is_recorded_late_also_after_a_rewind() -> None:
    """Older commits are recorded with higher offsets then."""
    settings = replace(SETTINGS, limits=BatchLimits(max_records_per_range=10))
    world, member = at_the_end()
    move(world, 5)
    member = world.member(owns=1, settings=settings)
    member.fails.add(commands.RecordCommit)
    batch(world, member)
    assert world.kafka.offset(0) == 15
    other = world.member(owns=1, settings=settings)
    world.wait(5, other)
    assert [(record.range, record.is_late) for record in world.dagster.recorded[1:]] == [
        (span(0, 5, 15), True)
    ]
