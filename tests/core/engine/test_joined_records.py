"""Commits that are joined into one record: no crash loses or doubles an offset."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.claims import LastCommit, decode
from dagster_rebalance.core.model.commands import RecordCommit, recorded_commits
from dagster_rebalance.core.model.commit_parts import NO_COMMITS, CommitPart, CommitParts
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.partitions.ledger import OffsetLedger
from dagster_rebalance.core.partitions.owned import OwnedPartition
from tests.core.story import Script, play
from tests.core.world import span, tp
from tests.story import stories

WIDE = EngineSettings(limits=BatchLimits(max_ranges_per_run=200))
BASE = EngineSettings(limits=BatchLimits(max_records_per_range=10), record_every_s=60)
SETTINGS = {
    "BASE": BASE,
    "WIDE": WIDE,
    "ONE_ATTEMPT": replace(BASE, max_attempts=1),
    "LETTERS": replace(BASE, max_attempts=1, dead_letter_topic="dead"),
}
JOINED = CommitParts.of([CommitPart(10, "r1"), CommitPart(20, "r2")])
COMMIT = RecordCommit(span(0, 0, 30), 1, "b3", "r3", 0, None, None, joined=JOINED)

STORIES = """
## commits_are_joined_into_one_record_per_interval_after_the_first
world 60 | join m 1 BASE | batches 4
offset 0 = 40 | recorded = 0[0,10) run1
wait 60
recorded = 0[0,10) run1, 0[10,40) run4 | ends = run2, run3, run4

## unrecorded_commits_do_not_show_as_waiting
world 20 | join m 1 BASE | batches 2
recorded = 0[0,10) run1
summary !~ not recorded

## unrecorded_commits_are_recorded_before_a_release
world 30 | join m 1 BASE | batches 3 | revoke 0 | wait 2
recorded = 0[0,10) run1, 0[10,30) run3
order 2 RecordCommits RecordReceipt = RecordCommits RecordReceipt

## unrecorded_commits_are_recorded_when_the_partition_stops
world 30 | join m 1 ONE_ATTEMPT | batches 2 | tick | run run3 FAILED is_over=1 | wait 2
recorded = 0[0,10) run1, 0[10,20) run2

## next_owner_of_a_killed_member_records_its_unrecorded_commits
world 40 | join blue 1 BASE | batches 3
last = 10 b3 run3
join green 1 BASE | wait 1
recorded = 0[0,10) run1, 0[10,30) run3 late
batches 1
last = 30 b4 run4

## next_owner_records_an_issued_record_and_the_commits_behind_it
world 40 | join blue 1 BASE | fails RecordCommits | batches 3
recorded = none
join green 1 BASE | wait 1
recorded = 0[0,10) run1 late, 0[10,30) run3 late

## next_owner_finds_an_issued_record_and_records_the_commits_behind_it
world 40 | join blue 1 BASE | unanswered RecordCommits | batches 3 | join green 1 BASE | wait 1
recorded = 0[0,10) run1, 0[10,30) run3 late

## commits_of_the_next_owner_do_not_join_those_of_the_former_owner
world 60 | join blue 1 BASE | fails RecordCommits | batches 3
join green 0 BASE | fails RecordCommits | assign 0 | wait 1 | batches 1 | offset 0 = 40
join red 1 BASE | wait 1
recorded = 0[0,10) run1 late, 0[10,30) run3 late, 0[30,40) run4 late

## commits_wait_for_the_records_of_many_owners
world 90 | join m1 1 BASE | fails RecordCommits | batches 2
join m2 0 BASE | fails RecordCommits | assign 0 | wait 1 | batches 1
join m3 0 BASE | fails RecordCommits | assign 0 | wait 1 | batches 1 | offset 0 = 40
join m4 0 BASE | fails RecordCommits | assign 0 | wait 1 | tick | start run5 | succeed run5 | wait 5
offset 0 = 40
answers | wait 5
offset 0 = 50

## requested_record_does_not_grow
# Dagster may have the record without an answer; more commits would then be in two records.
world 40 | join m 1 BASE | unanswered RecordCommits | batches 1 | wait 1 | tick | start run2
succeed run2 | wait 5
offset 0 = 20 | recorded = 0[0,10) run1
answers | wait 62
recorded = 0[0,10) run1, 0[10,20) run2

## requested_record_does_not_grow_after_a_stop
world 40 | join m 1 ONE_ATTEMPT | batches 2 | tick | unanswered RecordCommits
run run3 FAILED is_over=1 | wait 2 | add b3 0 20 30 SUCCEEDED | wait 5
offset 0 = 30
answers | wait 62
recorded = 0[0,10) run1, 0[10,20) run2, 0[20,30) run4

## commit_found_in_kafka_is_recorded_at_once
world 30 | join m 1 BASE | batches 2 | elect 0 | wait 3
recorded = 0[0,10) run1, 0[10,20) run2 late

## unanswered_commit_is_in_no_second_record
world 40 | join blue 1 BASE | batches 2 | tick | start run3 | succeed run3
unanswered WriteOffsets | wait 1
offset 0 = 30
fails WriteOffsets | revoke 0 | wait 310
released = 0
join green 1 BASE | wait 1
recorded = 0[0,10) run1, 0[10,30) run3 late

## commit_that_reaches_kafka_after_the_next_owner_has_read_it_is_in_one_record
# The hold was superseded, so Kafka still accepts the write.
world 30 | join blue 1 BASE | batches 2 | tick | start run3 | succeed run3 | fails WriteOffsets
wait 1 | join green 0 BASE | fails WriteOffsets | assign 0 | wait 1 | as blue | answers | revoke 0
wait 5
recorded = 0[0,10) run1, 0[10,20) run2 late, 0[20,30) run3

## dead_letter_has_a_separate_record
world 40 | join m 1 LETTERS | batches 2 | tick | run run3 FAILED is_over=1 | wait 5 | batches 1
wait 60
recorded = 0[0,10) run1, 0[10,20) run2, 0[20,30) run3 dead, 0[30,40) run4
"""


@stories(STORIES)
def test_joined_record(story: str) -> None:
    play(story, SETTINGS)


@pytest.mark.parametrize(
    ("known", "start", "joined"),
    [
        (set(), 0, ["r1", "r2"]),
        ({(0, 10, "r1")}, 10, ["r2"]),
        ({(0, 20, "r2")}, 20, []),
        ({(0, 10, "another run")}, 0, ["r1", "r2"]),
    ],
)
def test_recorded_commits_of_the_same_runs_are_left_out(
    known: set[tuple[int, int, str]], start: int, joined: list[str]
) -> None:
    rest = COMMIT.without(known)
    assert rest is not None
    assert (rest.range, [part.run_id for part in rest.joined]) == (span(0, start, 30), joined)


def test_record_whose_answer_was_lost_is_not_repeated() -> None:
    assert COMMIT.without({(0, 30, "r3")}) is None


def test_commits_in_a_joined_record_are_not_recorded_again_by_a_late_owner() -> None:
    """It was frozen, and finds an end in Kafka that the record of its successor exceeds."""
    known = set(recorded_commits(0, COMMIT.ends))
    late = replace(COMMIT, range=span(0, 0, 20), run_id="r2", joined=NO_COMMITS, is_late=True)
    assert late.without(known) is None
    assert replace(late, run_id="another run").without(known) is not None


def test_undone_range_cannot_be_noted_as_committed() -> None:
    ledger = OffsetLedger(tp(0), 1, 0).with_claim("b", 10)
    with pytest.raises(IllegalStateError, match="before it is done"):
        OwnedPartition(tp(0), 1, ledger=ledger)._last_commit(ledger.entries[0])


def test_last_commit_in_the_metadata_reaches_back_to_the_first_unrecorded_offset() -> None:
    script = play("world 40 | join m 1 BASE | batches 3", SETTINGS)
    stored = decode(script.world.kafka.stored[tp(0)])
    assert stored.last_commit == LastCommit(10, "b3", "run3")


@pytest.mark.parametrize("stored_after", range(3))
def test_record_that_hangs_is_stored_once_whenever_it_arrives(stored_after: int) -> None:
    """The storage thread of the former owner hangs while the next one records the same commits."""
    script = play("world 60 | join blue 1 BASE | fails RecordCommits | batches 3", SETTINGS)
    (hanging,) = issued_by(script)
    assert hanging.range == span(0, 0, 10)
    late = issued_by(script.play("join green 0 BASE | fails RecordCommits | assign 0 | wait 1"))
    assert [commit.range for commit in late] == [span(0, 0, 10), span(0, 10, 30)]
    late.insert(stored_after, hanging)
    for commit in late:
        script.world.dagster.record(commit)
    ranges = [record.range for record in script.world.dagster.recorded]
    assert sorted(ranges) == [span(0, 0, 10), span(0, 10, 30)]


@pytest.mark.parametrize(("partitions", "is_bounded"), [(100, False), (101, True)])
def test_release_leaves_many_records_to_the_next_owner(
    partitions: int, *, is_bounded: bool
) -> None:
    script = play(
        f"world 10 {partitions} | join m {partitions} WIDE | tick | start run1"
        " | fails RecordCommits | succeed run1 | wait 1",
        SETTINGS,
    )
    every = tuple(map(tp, range(partitions)))
    script.member.feed(events.RevokeRequested(every))
    script.play("wait 1.5 | released = none | wait 1")
    assert [gone for _, gone in script.world.released_by] == [every] * is_bounded
    assert script.world.dagster.recorded == []
    if is_bounded:
        script.play(f"join next {partitions} WIDE | wait 2")
        late = {one.range for one in script.world.dagster.recorded if one.is_late}
        assert late == {span(number, 0, 10) for number in range(partitions)}


def issued_by(script: Script) -> list[RecordCommit]:
    """The records that the current member has issued last."""
    command = script.member.given(commands.RecordCommits)[-1]
    assert isinstance(command, commands.RecordCommits)
    return list(command.commits)
