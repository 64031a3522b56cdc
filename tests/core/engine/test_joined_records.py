"""Commits that are joined into one record.

The tests show when the record is made, and that no crash loses or doubles an offset.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.batches.settings import EngineSettings
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.claims import LastCommit, decode
from dagster_rebalance.core.model.commands import recorded_commits
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.run import RunState
from dagster_rebalance.core.partitions.ledger import OffsetLedger
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.reporting.explain import summary
from tests.core.world import Member, World, span, tp

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import OffsetRange

SETTINGS = EngineSettings(limits=BatchLimits(max_records_per_range=10), record_every_s=60)
COMMIT = commands.RecordCommit(
    span(0, 0, 30), 1, "b3", "r3", 0, None, None, joined=((10, "r1"), (20, "r2"))
)


def work_off(world: World, member: Member, batches: int) -> list[str]:
    """Let so many batches succeed one after the other; returns their runs."""
    runs = []
    for _ in range(batches):
        world.wait(1, member)
        (run_id,) = member.tick()
        assert world.start(run_id) is None
        world.succeed(run_id)
        world.wait(1, member)
        runs.append(run_id)
    return runs


def recorded(world: World) -> list[tuple[OffsetRange, str]]:
    """What Dagster shows."""
    return [(record.range, record.run_id) for record in world.dagster.recorded]


def test_commits_are_joined_into_one_record_for_each_interval() -> None:
    """A trickle of small batches must not fill Dagster's storage.

    The first commit is shown at once.
    """
    world = World(records=60)
    member = world.member(owns=1, settings=SETTINGS)
    runs = work_off(world, member, 4)
    assert world.kafka.offset(0) == 40
    assert recorded(world) == [(span(0, 0, 10), runs[0])]
    world.wait(60, member)
    assert recorded(world)[1:] == [(span(0, 10, 40), runs[3])]
    assert [run_id for _, run_id in world.dagster.recorded[1].ends] == runs[1:]


def test_a_partition_does_not_say_that_it_waits_for_its_record() -> None:
    """It does not: nothing is kept back, and its next batch has its own words."""
    world = World(records=20)
    member = world.member(owns=1, settings=SETTINGS)
    work_off(world, member, 2)
    assert member.engine.partitions[tp(0)].unrecorded is not None
    assert "not recorded" not in summary(member.engine, world.now)


def test_what_is_not_recorded_is_recorded_before_a_release() -> None:
    """The next owner may be on another Dagster instance."""
    world = World(records=30)
    member = world.member(owns=1, settings=SETTINGS)
    runs = work_off(world, member, 3)
    member.feed(events.RevokeRequested((tp(0),)))
    world.wait(2, member)
    assert recorded(world)[1:] == [(span(0, 10, 30), runs[2])]
    order = [
        type(c)
        for c in member.done
        if isinstance(c, commands.RecordCommit | commands.RecordReceipt)
    ]
    assert order[-2:] == [commands.RecordCommit, commands.RecordReceipt]


def test_what_is_not_recorded_is_recorded_when_the_partition_stops() -> None:
    """A person looks at it now."""
    world = World(records=30)
    member = world.member(owns=1, settings=replace(SETTINGS, max_attempts=1))
    runs = work_off(world, member, 2)
    (failed,) = member.tick()
    world.dagster.move(failed, RunState.FAILED, is_over=True)
    world.wait(2, member)
    assert recorded(world)[1:] == [(span(0, 10, 20), runs[1])]


def test_the_next_owner_of_a_killed_member_records_all_that_was_not_recorded() -> None:
    """Kafka's note reaches back to the first offset without a record."""
    world = World(records=40)
    blue = world.member(owns=1, settings=SETTINGS)
    runs = work_off(world, blue, 3)
    assert decode(world.kafka.stored[tp(0)]).last_commit == LastCommit(10, "b3", runs[2])
    green = world.member(owns=1, settings=SETTINGS)
    world.wait(1, green)
    assert recorded(world) == [(span(0, 0, 10), runs[0]), (span(0, 10, 30), runs[2])]
    assert world.dagster.recorded[-1].is_late
    work_off(world, green, 1)
    assert decode(world.kafka.stored[tp(0)]).last_commit == LastCommit(30, "b4", "run4")


def test_a_record_that_was_asked_for_grows_no_more() -> None:
    """Dagster may have the record although it did not answer.

    If the record grew, the commits added to it would be in two records.
    """
    world = World(records=40)
    member = world.member(owns=1, settings=SETTINGS)
    member.unanswered.add(commands.RecordCommit)
    work_off(world, member, 1)
    world.wait(1, member)
    (run_id,) = member.tick()
    world.start(run_id)
    world.succeed(run_id)
    world.wait(5, member)
    assert world.kafka.offset(0) == 10, "the next commit waits for the answer"
    assert [bounds for bounds, _ in recorded(world)] == [span(0, 0, 10)]
    member.unanswered.clear()
    world.wait(62, member)
    assert [bounds for bounds, _ in recorded(world)] == [span(0, 0, 10), span(0, 10, 20)]


def test_a_record_of_a_stopped_partition_grows_no_more_when_it_goes_on() -> None:
    """The same, although the next record would not be due."""
    world = World(records=40)
    member = world.member(owns=1, settings=replace(SETTINGS, max_attempts=1))
    work_off(world, member, 2)
    (failed,) = member.tick()
    member.unanswered.add(commands.RecordCommit)
    world.dagster.move(failed, RunState.FAILED, is_over=True)
    world.wait(2, member)
    mended = world.dagster.add("b3", (span(0, 20, 30),), RunState.SUCCEEDED)
    world.wait(5, member)
    assert world.kafka.offset(0) == 20, "the next commit waits for the answer"
    member.unanswered.clear()
    world.wait(62, member)
    assert [until for until, _ in recorded(world)] == [
        span(0, 0, 10),
        span(0, 10, 20),
        span(0, 20, 30),
    ]
    assert world.dagster.recorded[-1].run_id == mended


def test_what_is_found_in_kafka_is_recorded_at_once() -> None:
    """Whoever committed it may have asked for its record already."""
    world = World(records=30)
    member = world.member(owns=1, settings=SETTINGS)
    work_off(world, member, 2)
    world.kafka.elect(0)
    world.wait(3, member)
    assert [bounds for bounds, _ in recorded(world)] == [span(0, 0, 10), span(0, 10, 20)]


def test_a_commit_under_way_is_in_no_second_record() -> None:
    """The commit reached Kafka without an answer.

    A record without this commit would end inside of what the next owner finds.
    """
    world = World(records=40)
    blue = world.member(owns=1, settings=SETTINGS)
    work_off(world, blue, 2)
    (run_id,) = blue.tick()
    world.start(run_id)
    world.succeed(run_id)
    blue.unanswered.add(commands.WriteOffsets)
    world.wait(1, blue)
    assert world.kafka.offset(0) == 30
    blue.fails.add(commands.WriteOffsets)
    blue.feed(events.RevokeRequested((tp(0),)))
    world.wait(310, blue)
    assert world.released_by, "the limit of the hold has passed"
    green = world.member(owns=1, settings=SETTINGS)
    world.wait(1, green)
    assert [bounds for bounds, _ in recorded(world)] == [span(0, 0, 10), span(0, 10, 30)]


def test_a_commit_that_reaches_kafka_after_the_next_owner_looked_is_in_one_record() -> None:
    """The hold was superseded without a word, so Kafka still takes the write.

    The next owner has already recorded the commits before it.
    """
    world = World(records=30)
    blue = world.member(owns=1, settings=SETTINGS)
    work_off(world, blue, 2)
    (run_id,) = blue.tick()
    world.start(run_id)
    world.succeed(run_id)
    blue.fails.add(commands.WriteOffsets)
    world.wait(1, blue)
    green = world.member(settings=SETTINGS)
    green.fails.add(commands.WriteOffsets)
    green.feed(events.PartitionsAssigned((tp(0),)))
    world.wait(1, green)
    blue.fails.clear()
    blue.feed(events.RevokeRequested((tp(0),)))
    world.wait(5, blue)
    assert [bounds for bounds, _ in recorded(world)] == [
        span(0, 0, 10),
        span(0, 10, 20),
        span(0, 20, 30),
    ]


def test_a_dead_letter_has_a_record_of_its_own() -> None:
    """Nobody processed it, so it must not hide among those that somebody did."""
    world = World(records=40)
    member = world.member(
        owns=1, settings=replace(SETTINGS, max_attempts=1, dead_letter_topic="dead")
    )
    work_off(world, member, 2)
    (failed,) = member.tick()
    world.dagster.move(failed, RunState.FAILED, is_over=True)
    world.wait(5, member)
    work_off(world, member, 1)
    world.wait(60, member)
    assert [(record.range, record.is_dead_letter) for record in world.dagster.recorded] == [
        (span(0, 0, 10), False),
        (span(0, 10, 20), False),
        (span(0, 20, 30), True),
        (span(0, 30, 40), False),
    ]


@pytest.mark.parametrize(
    ("known", "start", "joined"),
    [
        (set(), 0, COMMIT.joined),
        ({(0, 10, "r1")}, 10, ((20, "r2"),)),
        ({(0, 20, "r2")}, 20, ()),
        ({(0, 10, "another run")}, 0, COMMIT.joined),
    ],
)
def test_what_is_recorded_already_is_left_out(
    known: set[tuple[int, int, str]], start: int, joined: tuple[tuple[int, str], ...]
) -> None:
    """Only what the same runs did: an operator may have moved the offset back."""
    rest = COMMIT.without(known)
    assert rest is not None
    assert (rest.range, rest.joined) == (span(0, start, 30), joined)


def test_nothing_is_left_when_all_is_recorded() -> None:
    """An answer was lost."""
    assert COMMIT.without({(0, 30, "r3")}) is None


def test_what_a_joined_record_covers_is_not_recorded_again_by_a_late_owner() -> None:
    """It was frozen, and finds an end in Kafka that the record of its successor goes beyond."""
    known = set(recorded_commits(0, COMMIT.ends))
    late = replace(COMMIT, range=span(0, 0, 20), run_id="r2", joined=(), is_late=True)
    assert late.without(known) is None
    assert replace(late, run_id="another run").without(known) is not None


def test_what_is_not_done_cannot_be_noted_as_committed() -> None:
    """The ledger lets nobody ask for that; the note says so once more."""
    ledger = OffsetLedger(tp(0), 1, 0).claim("b", 10)
    with pytest.raises(IllegalStateError, match="before it is done"):
        OwnedPartition(tp(0), 1, ledger=ledger)._last_commit(ledger.entries[0])
