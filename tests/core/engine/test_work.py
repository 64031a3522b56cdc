"""The life of a batch: plan, claim, request, run, commit and record, and failures of each step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings, ForeignMetadata
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.retry import RetryBackoff
from tests.core.story import play
from tests.core.world import World, span, tp
from tests.story import stories

TWO_CLAIMS = EngineSettings(
    limits=BatchLimits(max_records_per_range=10, max_claims_per_partition=2)
)
SETTINGS = {
    "TWO_CLAIMS": TWO_CLAIMS,
    "TWO_DELAYS": replace(TWO_CLAIMS, recheck_s=5.0, backoff=RetryBackoff(0.5, 10.0)),
    "ONE_ATTEMPT": EngineSettings(max_attempts=1),
    "SEPARATE": EngineSettings(limits=BatchLimits(max_ranges_per_run=1)),
    "TWO_RUNS": EngineSettings(limits=BatchLimits(max_ranges_per_run=1, max_runs_in_flight=2)),
    "WAITS": EngineSettings(limits=BatchLimits(min_records=100, max_wait_s=30)),
    "SMALL_WAITS": EngineSettings(
        limits=BatchLimits(max_records_per_batch=10, min_records=100, max_wait_s=30)
    ),
    "OVERWRITE": EngineSettings(foreign_metadata=ForeignMetadata.OVERWRITE),
}

CLAIMS = """
## claims_are_read_again_after_a_run_refused_itself
# Moving the offset erases the claims, so each run would refuse itself forever.
join m 1 | stored 0 40 | tick | refuse run1 | wait 3
claims 0 = 100:b2 | requests = b2.1 0[40,100)

## claims_of_a_stopped_partition_are_read_again_after_a_run_refused_itself
join m 1 ONE_ATTEMPT | tick | start run1 | run run1 FAILED | wait 2
phase = STOPPED
stored 0 40 | add b1 0 0 100 WAITING | run run2 WAITING parent_id=r1 | refuse run2 | wait 11
phase = OWNED | requests = b2.1 0[40,100)

## refusals_of_a_range_do_not_prolong_the_wait_of_another_one
# Each read of the claims begins the waits again, so a refused run may cause only one.
world 20 | join m 1 TWO_DELAYS | wait 1
add b1 0 0 10 STARTED | add b1 0 0 10 STARTED | add b1 0 0 10 STARTED | add b1 0 0 10 STARTED
add b1 0 0 10 STARTED | add b2 0 10 20 STARTED
run run1 FAILED is_refused=1 | run run2 FAILED is_refused=1 | run run3 FAILED is_refused=1
run run4 FAILED is_refused=1 | run run5 FAILED is_refused=1 | run run6 FAILED is_refused=1
wait 30
requests ~ 0[0,10) | requests !~ 0[10,20)

## valid_claim_is_kept_after_a_run_refused_itself
join m 1 | tick | run run1 FAILED is_refused=1 | wait 10
claims 0 = 100:b1 | requests = b1.2 0[0,100) | given ReadStoredOffsets = 2

## batch_is_requested_under_the_same_key_until_its_run_exists
join m 1 | requests = b1.1 0[0,100)
ticks | wait 5 | requests = b1.1 0[0,100) | ticks | wait 5 | requests = b1.1 0[0,100)
ticks | wait 5 | ticks | wait 5 | ticks | wait 5 | requests = b1.1 0[0,100)
tick | made = run1 | tick | made = none | wait 1 | requests = none

## batch_that_fails_twice_and_then_succeeds_is_committed_once
join m 1 | tick | start run1 | run run1 FAILED | wait 1 | claims 0 = 100:b1
tick | start run2 | run run2 FAILED | wait 1 | claims 0 = 100:b1
tick | start run3 | succeed run3 | wait 1 | commits = 0:100 | runs = run1, run2, run3

## two_batches_that_end_out_of_order_are_committed_in_order
world 25 | join m 1 TWO_CLAIMS | wait 1 | tick | start run1 | start run2 | succeed run2 | wait 2
offset 0 = 0
succeed run1 | wait 1
commits = 0:10, 0:20 | recorded = 0[0,10) run1, 0[10,20) run2

## batch_is_not_claimed_without_recent_ticks
world 0 | join m 1 | wait 16 | produce 0 10 | wait 5
claims 0 = none
tick | wait 2
claims 0 = 10:b1

## first_position_of_a_group_is_written_at_once
# Otherwise `latest` would move on with each rebalance and skip records.
world 0 | join m 1
offset 0 = 0 | claims 0 = none

## first_batch_of_a_partition_does_not_wait_for_more_records
world 5 | join m 1 WAITS | tick | start run1 | succeed run1 | wait 2 | produce 0 10 | wait 20
tick | made = none
wait 15 | tick | ranges run2 = 0[5,15)

## records_that_exceed_a_batch_do_not_wait_again
world 5 | join m 1 SMALL_WAITS | tick | start run1 | succeed run1 | wait 2 | produce 0 25 | wait 35
tick | start run2 | ranges run2 = 0[5,15) | succeed run2 | wait 3
tick | start run3 | ranges run3 = 0[15,25) | succeed run3 | wait 3
tick | start run4 | ranges run4 = 0[25,30) | succeed run4 | wait 3
produce 0 1 | wait 20 | tick | made = none
"""
STOPS = """
## runs_of_a_stopped_partition_are_read_rarely
world 10 | join m 1 ONE_ATTEMPT | tick STARTED | run run1 FAILED | wait 2
phase = STOPPED
mark ReadRuns | turns 60
between ReadRuns 5 7 = True
add b1 0 0 10 | turns 11 | mark ReadRuns | turns 5
given ReadRuns = 5

## restoring_partitions_count_towards_the_limit_of_runs
# Otherwise each restart of a broker would double the runs.
world 0 4 | join m 4 TWO_RUNS | produce 0 100 | produce 1 100 | wait 2 | tick STARTED
made = run1, run2
produce 2 100 | produce 3 100 | wait 3 | elect 0 | elect 1 | fails ReadStoredOffsets | wait 2
tick STARTED | answers | wait 3
runs = run1, run2

## runs_are_read_sooner_while_records_wait
join m 1 | tick STARTED | mark ReadRuns | turns 10
given ReadRuns = 10
produce 0 100 | turns 1 | succeed run1 | mark WriteOffsets | wait 0.5
given WriteOffsets = 2  # the commit, and the next claim

## retry_of_dagster_is_waited_for
join m 1 | tick STARTED | run run1 FAILED awaits_retry=1 | wait 5
requests = none
add b1 0 0 100 | run run1 FAILED awaits_retry=0 | succeed run2 | wait 1
offset 0 = 100

## foreign_metadata_stops_a_partition_until_it_is_removed
stored 0 50 host-7 | join m 1
phase = STOPPED
wait 30
shown = 0 stopped | reason ~ 'host-7' was not written by dagster_rebalance | offset 0 = 50
stored 0 50 | tick | wait 11
shown = 0 stopped, 0 resumed | claims 0 = 100:b1

## foreign_metadata_is_overwritten_if_configured
stored 0 50 host-7 | join m 1 OVERWRITE
claims 0 = 100:b1

## deleted_next_offset_stops_the_partition_until_an_operator_moves_it
world 0 | join m 1 | bounds 0 30 60 | wait 1.25
reason ~ Kafka's retention deleted records from offset 0 on
bounds 0 40 60 | wait 21
shown = 0 stopped | offset 0 = 0  # more retention is no news
stored 0 40 | tick | wait 11
shown = 0 stopped, 0 resumed | claims 0 = 60:b1

## failed_range_that_was_deleted_is_skipped_when_an_operator_moves_the_offset
world 10 | join m 1 ONE_ATTEMPT | tick | run run1 FAILED has_started=1 is_over=1 | wait 2
reason ~ failed
bounds 0 30 60 | wait 11
reason ~ Kafka's retention deleted records from offset 0 on
stored 0 30 | tick | wait 11
shown = 0 stopped, 0 stopped, 0 resumed | claims 0 = 60:b2

## partition_that_passes_deleted_records_is_shown_as_resumed
# Its runs had read the records in time; another member may have shown it as stopped.
world 20 | join m 1 TWO_CLAIMS | wait 2 | tick | start run1 | start run2 | bounds 0 17 20 | wait 2
succeed run1 | wait 2
offset 0 = 10 | shown = none
succeed run2 | wait 2
offset 0 = 20 | shown = 0 resumed

## partition_moved_past_deleted_records_is_shown_as_resumed
world 10 | join m 1 | tick | start run1 | bounds 0 7 10 | wait 2 | stored 0 7
succeed run1 | wait 2
shown = 0 resumed | claims 0 = 10:b2
"""
WRITES = """
## commit_with_a_lost_answer_is_repeated_and_counts_once
join m 1 | tick STARTED | succeed run1 | unanswered WriteOffsets | wait 1
offset 0 = 100 | recorded = none
answers | wait 1
commits = 0:100 | recorded = 0[0,100) run1

## next_commit_does_not_wait_for_the_record_of_the_last_one
world 20 | join m 1 TWO_CLAIMS | wait 1 | tick STARTED | succeed run1 | succeed run2
fails RecordCommits | wait 3
commits = 0:10, 0:20 | recorded = none | between RecordCommits 2 4 = True
answers | wait 2
commits = 0:10, 0:20 | recorded = 0[0,10) run1, 0[10,20) run2

## changed_offset_is_read_again_and_not_overwritten
join m 1 | tick | start run1 | stored 0 50 | succeed run1 | wait 2
offset 0 = 50 | commits = none | claims 0 = 100:b2
log ~ another client has changed the stored offset of orders-0: reading it again

## run_without_a_claim_is_waited_for_before_a_new_claim
# A reset erased its claim, but it writes to the same output.
join m 1 | tick | start run1 | produce 0 20 | stored 0 50 | lose 0 | assign 0 | wait 5
phase = RESTORING | blocked = run1 | claims 0 = none
succeed run1 | tick | wait 2
claims 0 = 120:b2 | blocked = none

## run_without_a_claim_is_waited_for_until_its_process_is_over
add x 0 0 100 STARTED | run run1 STARTED heartbeat=begun | join m 1 | turns 5
run run1 CANCELED is_over=0 | turns 40
blocked = run1
run run1 CANCELED is_over=1 | turns 3
claims 0 = 100:b1
"""
DEAD_RUNS = """
## dead_run_is_ended_and_its_batch_is_requested_again
join m 1 | tick | start run1 | turns 58
ended = none
turns 8
ended = run1:begun | ranges run2 = 0[0,100)

## dead_run_that_cannot_be_ended_stops_its_partition_until_it_is
join m 1 | tick | start run1 | fails EndDeadRuns | turns 650
shown = none
turns 30
shown = 0 stopped | reason ~ orders-0: run run1 sends no heartbeat, and could not be ended
answers | turns 40
shown = 0 stopped, 0 resumed | ranges run2 = 0[0,100)

## dead_run_that_blocks_a_restoring_partition_and_cannot_be_ended_stops_it
add x 0 0 100 STARTED | run run1 STARTED heartbeat=begun
join m 0 | fails EndDeadRuns | assign 0 | turns 650
shown = none
turns 30
phase = RESTORING | reason ~ orders-0: run run1 sends no heartbeat, and could not be ended
answers | turns 40
shown = 0 stopped, 0 resumed | claims 0 = 100:b1

## run_that_ended_only_in_dagster_has_no_rival
# The work of a run may continue, for example in Spark, after Dagster shows its end.
join m 1 | tick | start run1 | wait 1 | run run1 FAILED is_over=0 | turns 50
runs = run1 | ended = none
summary ~ run run1 has ended in Dagster, and its process may still be running
turns 15
ended = run1:begun | runs = run1, run2

## run_that_reported_its_end_is_retried_at_once_after_its_external_work_was_stopped
join m 1 | tick | start run1 | wait 1 | run run1 FAILED is_gone=1 is_over=0 | turns 4
ended = run1:begun | runs = run1, run2

## next_owner_waits_until_a_run_is_over
join first 1 | tick | start run1 | wait 1 | lose 0 | run run1 CANCELED is_over=0
join second 1 | turns 50
runs = run1
turns 15
ended = run1:begun | runs = run1, run2

## run_that_is_deleted_while_it_works_has_no_rival
join m 1 | tick | start run1 | wait 1 | delete run1 | turns 50
runs = none
turns 15
ended = run1:begun | runs = run2

## run_that_is_deleted_while_its_partition_moves_has_no_rival
join first 1 | tick | start run1 | wait 1 | run run1 DELETED is_over=0 | delete
join second 1 | tick | turns 50
runs = run1 | summary ~ run run1 was deleted from Dagster, and its process may still be running
turns 15
runs = run2

## deleted_run_whose_process_is_gone_is_ended_at_once
join m 1 | tick | start run1 | wait 1 | run run1 DELETED is_over=0 is_gone=1 | delete | turns 4
ended = run1:begun | runs = run2 | summary !~ counts as dead

## dead_run_on_partitions_of_other_members_is_left_to_them
world 100 2 | add x 0 0 100 STARTED | add y 1 0 100 STARTED
run run1 STARTED heartbeat=begun | run run2 STARTED heartbeat=begun | join m 1 | turns 65
ended = run1:begun
"""


@stories(CLAIMS + STOPS + WRITES + DEAD_RUNS)
def test_work(story: str) -> None:
    play(story, SETTINGS)


def test_batch_is_claimed_before_its_request_and_committed_before_its_record() -> None:
    """This order makes a crash at any point harmless."""
    script = play("""
        join m 0 | fails WriteOffsets | assign 0
        requests = none
        answers | wait 1.25
        claims 0 = 100:b1
        tick | start run1 | wait 1 | succeed run1 | wait 1
        offset 0 = 100 | recorded = 0[0,100) run1 | entries = none
        order 2 WriteOffsets RecordCommits = WriteOffsets RecordCommits
    """)
    (record,) = script.world.dagster.recorded
    assert (record.batch_id, record.lag, record.drain_s) == ("b1", 0, None)


def test_partition_stops_after_max_attempts_and_resumes_when_its_run_is_re_executed() -> None:
    script = play("world 100 2 | join m 2 SEPARATE | tick STARTED", SETTINGS)
    (failing,) = script.world.dagster.runs["run1"].ranges
    number = failing.partition
    script.play("run run1 FAILED | wait 1 | tick STARTED | run run3 FAILED | wait 1")
    script.play(f"tick STARTED | run run4 FAILED | wait 1 | phase {number} = STOPPED")
    owned = script.member.engine.partitions
    stopped = owned[failing.topic_partition]
    assert stopped.stop_reason == (
        f"{failing.topic_partition}: 3 runs failed on {failing}, the last one is run4. "
        "Fix the cause, then re-execute that run in Dagster, or `dagster-rebalance retry "
        f"orders:{number}`: when it succeeds, the partition continues"
    )
    assert stopped.last_failure == ("run4", stopped.entries[0].batch_id, "")
    assert {one.last_failure for one in owned.values()} == {stopped.last_failure, None}
    script.play(f"""
        shown = {number} stopped | requests = none
        add b1 {number} 0 100 | wait 11
        shown = {number} stopped  # the new run may fail again
        succeed run5 | wait 1
        shown = {number} stopped, {number} resumed | commits = {number}:100 | phase {number} = OWNED
    """)


def test_stopped_partition_does_not_count_towards_the_limit_of_runs() -> None:
    one_run = replace(
        TWO_CLAIMS, max_attempts=1, limits=replace(TWO_CLAIMS.limits, max_runs_in_flight=1)
    )
    script = play("world 20 | join m 1 ONE_RUN | tick STARTED", {"ONE_RUN": one_run})
    engine = script.member.engine
    engine.settings = replace(one_run, limits=replace(one_run.limits, max_runs_in_flight=2))
    script.play("wait 2 | claims 0 = 10:b1, 20:b2")
    engine.settings = one_run
    script.play("""
        run run1 FAILED | wait 2
        phase = STOPPED
        produce 1 5 | tick | assign 1 | wait 1
        claims 1 = 5:b3
    """)


def test_failed_write_is_repeated_only_after_a_while() -> None:
    script = play("join m 1 | tick STARTED | succeed run1 | fails WriteOffsets | wait 1")
    pending = script.member.engine.partitions[tp(0)].pending
    assert pending is not None
    script.do_mark("WriteOffsets")
    failed = ((pending.write, events.WriteFailure.RETRIABLE),)
    script.member.feed(events.OffsetsWritten((), failed))
    script.play("given WriteOffsets = 0 | wait 1.25 | given WriteOffsets = 1")


def test_batch_with_an_unwritten_claim_is_not_requested() -> None:
    world = World(records=10, partitions=2)
    settings = EngineSettings(limits=BatchLimits(max_runs_in_flight=1))
    member = world.member(settings=settings)
    member.fails.add(commands.WriteOffsets)
    member.feed(events.PartitionsAssigned((tp(0), tp(1))))
    first = [owned.pending for owned in member.engine.partitions.values()]
    member.feed(events.OffsetsWritten(tuple(pending.write for pending in first if pending)))
    claims = [owned.pending.write for owned in member.engine.partitions.values() if owned.pending]
    assert len(claims) == 2
    member.feed(events.OffsetsWritten((claims[0],), ((claims[1], events.WriteFailure.RETRIABLE),)))
    assert not member.engine.batch_requests
    member.feed(events.OffsetsWritten((claims[1],)))
    assert [one.ranges for one in member.engine.batch_requests] == [
        (span(0, 0, 10), span(1, 0, 10))
    ]


def test_second_assignment_of_a_partition_raises_and_changes_nothing() -> None:
    member = play("world 0 2 | join m 1").member
    before = dict(member.engine.partitions)
    with pytest.raises(IllegalStateError, match="orders-0 was assigned twice"):
        member.feed(events.PartitionsAssigned((tp(1), tp(0))))
    assert member.engine.partitions == before


def test_partition_without_a_known_offset_cannot_be_claimed() -> None:
    why = "orders-0 cannot be claimed before its committed offset is known"
    with pytest.raises(IllegalStateError, match=why):
        OwnedPartition(tp(0), 1).claim_write("b", 10, now=0.0)
    with pytest.raises(IllegalStateError, match=why):
        OwnedPartition(tp(0), 1).reassign_write(span(0, 0, 10), "b", now=0.0)
    with pytest.raises(IllegalStateError, match=why):
        OwnedPartition(tp(0), 1).bisect_write(now=0.0)


def test_lag_of_a_partition_without_a_known_offset_is_zero() -> None:
    assert OwnedPartition(tp(0), 1, Phase.RESTORING).lag == 0
