"""Offsets that vanished, were moved back or belong to another log stop their partition."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.offsets import Bounds, Log
from dagster_rebalance.core.model.topics import StartFrom
from tests.core.story import Script, play
from tests.core.world import tp
from tests.story import stories

LONG = EngineSettings(lease_s=100_000.0)
SETTINGS = {
    "LONG": LONG,
    "LATEST": replace(LONG, start_from=StartFrom.LATEST),
    "EARLIEST": replace(LONG, start_from=StartFrom.EARLIEST),
    "SMALL": replace(LONG, limits=BatchLimits(max_records_per_range=10)),
}
AT_THE_END = """
world 0 | topic_id id-1 | elect 0 | join m 1 START | produce 0 20 | wait 5 | tick | start run1
succeed run1 | wait 5
offset 0 = 20
"""
RECHECK = " | ".join(["ticks | wait 5"] * 6)

STORIES = """
## vanished_offset_of_a_member_stops_the_partition
stored 0 none | produce 0 10 | RECHECK
phase = STOPPED | offset 0 = none

## truncation_between_two_reads_stops_the_partition_for_each_owner
elect 0 15 | produce 0 30 | RECHECK
phase = STOPPED
join other 1
phase = STOPPED | reason ~ the group is at offset 20, but the log lost records before that offset

## truncation_below_a_claim_stops_the_partition
# The run may have read records that are gone, and the new ones would be skipped.
produce 0 10 | wait 5 | elect 0 25 | produce 0 30 | wait 5
phase = STOPPED

## batch_is_not_planned_with_the_bounds_of_an_unverified_leader
fails ReadStoredOffsets | elect 0 | produce 0 10 | wait 5
claims 0 = none

## recreated_topic_stops_the_partition
topic_id id-2 | produce 0 30 | join other 1
phase = STOPPED | reason ~ deleted and recreated
"""


def at_the_end(settings: str = "LONG") -> Script:
    """A member that has committed all of the 20 offsets of orders-0."""
    return play(AT_THE_END.replace("START", settings), SETTINGS)


@stories(STORIES)
def test_moved_offset(story: str) -> None:
    at_the_end().play(story.replace("RECHECK", RECHECK))


@pytest.mark.parametrize("start_from", list(StartFrom))
def test_vanished_offset_stops_the_partition_until_an_operator_commits_one(
    start_from: StartFrom,
) -> None:
    """Kafka drops the offsets of a group whose sensors were off for a week."""
    script = at_the_end(start_from.name)
    script.play(f"stored 0 none | produce 0 10 | join other 1 {start_from.name} | {RECHECK}")
    script.play("phase = STOPPED | offset 0 = none | stored 0 20")
    script.play(f"{RECHECK} | phase = OWNED | claims 0 = 30:b2")


def test_group_with_wiped_records_starts_again() -> None:
    """Wipe the asset to reuse a group id."""
    script = at_the_end().play("stored 0 none | join other 1 | phase = STOPPED")
    script.world.dagster.recorded.clear()
    script.play(f"{RECHECK} | offset 0 = 0")


@pytest.mark.parametrize("has_epochs", [False, True])
def test_truncated_log_that_grows_again_stays_stopped(*, has_epochs: bool) -> None:
    """The new records have offsets that the group has passed."""
    text = AT_THE_END.replace("START", "LONG")
    script = play(text if has_epochs else text.replace("| elect 0 ", ""), SETTINGS)
    bounds = script.world.kafka.bounds
    bounds[tp(0)] = replace(bounds[tp(0)], until=15)
    script.play(f"""
        {"elect 0 15 | " * has_epochs}{RECHECK}
        phase = STOPPED
        produce 0 30 | {RECHECK}
        phase = STOPPED
        stored 0 15 | {RECHECK}
        claims 0 = 45:b2
    """)


def log(script: Script) -> Log:
    """The log that the stored offset names."""
    return decode(script.world.kafka.stored[tp(0)]).log


def test_clean_election_changes_only_the_stored_epoch() -> None:
    script = at_the_end().play("elect 0 | wait 5 | shown = none")
    assert log(script) == Log("id-1", 2)
    script.play("produce 0 10 | wait 5 | tick | start run2 | succeed run2 | wait 5 | offset 0 = 30")


def test_resumed_partition_with_an_unverified_leader_has_no_backlog() -> None:
    """A stopped partition is not restored at each election."""
    owned = at_the_end().owned()
    for epoch, is_planned in ((1, True), (2, False)):
        grown = owned._replace(bounds=Bounds(0, 40, epoch), backlog_since=0.0)
        assert (grown.backlog is not None) is is_planned


def test_new_leader_is_verified_when_no_write_is_pending() -> None:
    script = at_the_end().play("unanswered WriteOffsets | produce 0 10 | wait 5 | elect 0 | wait 5")
    assert script.owned().pending is not None
    script.play("answers | wait 5 | claims 0 = 30:b2")
    assert log(script) == Log("id-1", 2)


def test_first_position_names_its_log() -> None:
    """A topic may be recreated before the first commit."""
    script = play("world 20 | topic_id id-1 | join m 0 LATEST | assign 0 | offset 0 = 20", SETTINGS)
    assert log(script) == Log("id-1")


def test_commit_after_a_rewind_is_recorded_late() -> None:
    """Older commits are recorded with higher offsets."""
    at_the_end().play("""
        stored 0 5 | join m 1 SMALL | fails RecordCommits | wait 5 | tick | start run2
        succeed run2 | wait 5
        offset 0 = 15
        join other 1 SMALL | wait 5
        recorded = 0[0,20) run1, 0[5,15) run2 late
    """)


def test_first_position_of_a_recreated_topic_is_read_again() -> None:
    """A topic may be recreated while its member waits for Dagster's storage before the write."""
    script = play("world 20 | topic_id id-1 | join m 0 LATEST | fails ReadRuns", SETTINGS)
    script.play("assign 0 | wait 5 | phase = RESTORING | offset 0 = none")
    script.world.kafka.bounds[tp(0)] = Bounds(0, 5)
    script.play("topic_id id-2 | answers | wait 5 | phase = OWNED | offset 0 = 5")
    assert log(script) == Log("id-2")
