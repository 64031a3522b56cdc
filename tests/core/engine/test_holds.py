"""Holds: drain, commit and release within the time limit, and write a receipt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.engine_settings import (
    DeadlinePolicy,
    EngineSettings,
    HoldBudget,
    LeavePolicy,
    LossPolicy,
)
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.commands import Cause
from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.core.runs.liveness import Liveness
from tests.core.story import play
from tests.core.world import World, tp
from tests.story import stories

BASE = EngineSettings(
    limits=BatchLimits(max_ranges_per_run=1), budget=HoldBudget(30, 5), lease_s=1000
)
SETTINGS = {
    "BASE": BASE,
    "HAND_OVER": replace(BASE, on_deadline=DeadlinePolicy.RELEASE),
    "TWO_CLAIMS": replace(
        BASE, limits=BatchLimits(max_records_per_range=10, max_claims_per_partition=2)
    ),
    "ONE_RUN": replace(BASE, limits=BatchLimits(max_runs_in_flight=1)),
    "ONE_ATTEMPT": replace(BASE, max_attempts=1),
    "DRAIN": replace(BASE, on_leave=LeavePolicy.DRAIN),
    "CANCEL_LOST": replace(BASE, on_lost=LossPolicy.CANCEL),
    "SHORT_LEASE": replace(BASE, lease_s=60, liveness=Liveness(heartbeat_timeout_s=1000)),
}

REVOKES = """
## hold_without_work_is_released_in_the_same_call
world 0 2 | join m 2 | revoke 0
released = 0 | outcomes = revoke nothing to do | owns = 1 | held = none

## hold_with_run_drains_commits_records_and_releases_in_this_order
at_work 1 BASE | revoke 0 | wait 5
released = none | held = 0
succeed run1 | wait 0.25
outcomes = revoke drained | receipt committed = 0:100 | receipt run_ids = run1
receipt seconds = 5.25 | owns = none
order 3 WriteOffsets RecordCommits RecordReceipt = WriteOffsets RecordCommits RecordReceipt

## commit_in_hold_names_the_log_that_its_run_has_read
# The log was truncated before the revoke, and the member has not read it since.
at_work 1 BASE | elect 0 | wait 5 | fails ReadStoredOffsets | elect 0 50 | produce 0 200 | wait 5
revoke 0 | succeed run1 | wait 1
commits = 0:100
join heir 1 | wait 1
reason ~ the log lost records before that offset

## partition_with_moved_offset_is_released_at_once
at_work 1 BASE | stored 0 50 | elect 0 | fails ReadRuns | wait 5
phase = RESTORING
revoke 0
released = 0

## no_new_work_starts_on_a_held_partition
at_work 1 TWO_CLAIMS 10 | revoke 0 | produce 0 100 | tick | wait 5
claims 0 = 10:b1 | runs = run1

## partition_of_a_hold_commits_while_another_one_still_works
at_work 2 BASE | revoke 0 1 | succeed run1 | wait 2
commits = 0:100 | phase 0 = DRAINED | released = none
succeed run2 | wait 1
released = 0 1 | receipt committed 0 = 0:100, 1:100

## revoke_while_restoring_is_released_at_once
join first 1 | tick STARTED | join m 0 | fails ReadStoredOffsets | assign 0 | revoke 0
released = 0 | given WriteOffsets = 0

## revoke_with_unanswered_claim_is_released_at_once
join m 0 | stored 0 0 | unanswered WriteOffsets | assign 0
claims 0 = 100:b1
revoke 0
released = 0
join heir 1
requests = b1.1 0[0,100)

## unanswered_claim_does_not_block_the_commit_of_an_earlier_batch
at_work 1 TWO_CLAIMS 10 | produce 0 10 | unanswered WriteOffsets | tick | wait 1.25
claims 0 = 10:b1, 20:b2
revoke 0 | answers | succeed run1 | wait 2
commits = 0:10 | outcomes = revoke drained
receipt committed = 0:10 | receipt handed_over = 0

## changed_offset_ends_the_drain_without_a_write
at_work 1 BASE | revoke 0 | stored 0 7 | succeed run1 | wait 1
offset 0 = 7 | released = 0

## stopped_partition_is_released_at_once_and_its_stop_is_cleared
at_work 1 ONE_ATTEMPT | run run1 FAILED | wait 1
shown = 0 stopped
revoke 0
shown = 0 stopped, 0 resumed | released = 0
join heir 1 ONE_ATTEMPT
phase = STOPPED
lose 0
shown = 0 stopped, 0 resumed

## failed_run_in_a_hold_leaves_its_claim_to_the_next_owner
at_work 1 BASE | revoke 0 | run run1 FAILED | wait 1
outcomes = revoke drained | receipt handed_over = 0 | claims 0 = 100:b1
"""
CANCELS = """
## queued_run_is_cancelled_at_once_and_counts_no_attempt
join m 1 BASE | tick | wait 1 | revoke 0
given CancelRuns = 1 | outcomes = revoke drained
receipt cancelled = run1 | receipt handed_over = 0 | claims 0 = 100:b1
join heir 1
requests = b1.2 0[0,100)

## launching_run_is_cancelled_at_once
# On Kubernetes a pod may wait minutes for a node.
join m 1 BASE | tick STARTING | wait 1 | revoke 0
state run1 = CANCELING
run run1 CANCELED | wait 1
outcomes = revoke drained | receipt cancelled = run1 | receipt handed_over = 0

## run_that_starts_in_spite_of_its_cancellation_is_waited_for
# Dagster's default launcher cannot cancel a launching run.
join m 1 BASE | tick STARTING | wait 1 | fails CancelRuns | revoke 0 | wait 2.25
given CancelRuns = 3
start run1 | wait 3
given CancelRuns = 3
succeed run1 | wait 1
outcomes = revoke drained | receipt committed = 0:100 | receipt cancelled = none

## queued_run_that_started_since_the_last_read_is_waited_for
join m 1 BASE | tick WAITING | wait 1 | start run1 | revoke 0 | wait 3
state run1 = STARTED
succeed run1 | wait 1
outcomes = revoke drained | receipt committed = 0:100 | receipt cancelled = none

## launching_run_that_started_since_the_last_read_is_waited_for
join m 1 BASE | tick STARTING | wait 1 | start run1 | revoke 0 | wait 3
state run1 = STARTED
succeed run1 | wait 1
outcomes = revoke drained | receipt committed = 0:100 | receipt cancelled = none

## receipt_does_not_list_a_run_as_cancelled_that_was_left_running
join m 1 HAND_OVER | tick | wait 1 | start run1 | revoke 0 | wait 60
outcomes = revoke deadline | receipt run_ids = run1 | receipt cancelled = none

## failed_cancellation_is_repeated
join m 1 BASE | tick | wait 1 | fails CancelRuns | revoke 0 | wait 2.25
given CancelRuns = 3
answers | wait 1.25
state run1 = CANCELED | released = 0

## queued_run_shared_with_a_kept_partition_is_requested_again_without_the_held_one
world 100 2 | join m 2 ONE_RUN | tick | wait 1 | revoke 0
state run1 = CANCELED | requests = b1.2 1[0,100)

## runs_are_read_again_before_a_partition_counts_as_drained
join m 1 BASE | fails ReadRuns | tick STARTED | revoke 0 | wait 2
released = none
answers | wait 2
released = none | explained ~ waits for run run1
"""
DEADLINES = """
## deadline_cancels_runs_and_the_release_waits_for_their_end
at_work 1 BASE | revoke 0 | wait 24.75
given CancelRuns = 0
wait 0.25
state run1 = CANCELING
wait 3
released = none
run run1 CANCELED | wait 0.25
outcomes = revoke deadline | receipt cancelled = run1 | receipt handed_over = 0
receipt seconds = 28.25

## run_that_ignores_its_cancellation_is_handed_over_at_the_limit
at_work 1 BASE | revoke 0 | wait 29.75
released = none
wait 0.25
released = 0 | outcomes = revoke deadline | receipt seconds = 30.0 | receipt handed_over = 0
join heir 1
live = run1

## deadline_with_policy_release_hands_runs_over_and_the_next_owner_commits_them
at_work 1 HAND_OVER | revoke 0 | wait 25
given CancelRuns = 0 | outcomes = revoke deadline | receipt handed_over = 0
succeed run1 | join heir 1
commits = 0:100 | recorded = 0[0,100) run1 | entries = none

## run_that_ends_at_the_deadline_is_committed_within_the_slice
at_work 1 BASE | revoke 0 | fails WriteOffsets | wait 24.5 | succeed run1 | wait 2
released = none
answers | wait 2
commits = 0:100 | outcomes = revoke drained | receipt committed = 0:100 | receipt handed_over = none

## run_that_ends_at_the_deadline_is_committed_within_the_slice_of_policy_release
at_work 1 HAND_OVER | revoke 0 | fails WriteOffsets | wait 24.5 | succeed run1 | wait 2
released = none
answers | wait 2
commits = 0:100 | outcomes = revoke drained | receipt committed = 0:100 | receipt handed_over = none
"""
LOSSES = """
## loss_in_a_hold_writes_one_receipt_and_no_offset
at_work 2 BASE | revoke 0 1 | wait 2 | lose 0 1 | mark WriteOffsets | succeed run1 | wait 40
outcomes = revoke lost | receipt partitions = 0 1 | receipt handed_over = 0 1
given WriteOffsets = 0 | released = none | holds = 0

## receipt_of_a_loss_names_only_the_lost_part_of_the_hold
at_work 2 BASE | revoke 0 1 | succeed run1 | wait 1 | lose 1 | wait 1
outcomes = revoke lost, revoke drained | state run2 = STARTED
receipt partitions 0 = 1 | receipt committed 0 = none
receipt partitions 1 = 0 | receipt committed 1 = 0:100

## loss_of_another_partition_does_not_touch_the_hold
at_work 2 BASE | revoke 0 | lose 1
outcomes = none | holds = 1 | held = 0 | owns = 0

## superseded_hold_is_neither_released_nor_committed
at_work 2 BASE | revoke 0 | supersede 0 | succeed run1 | wait 40
outcomes = revoke superseded | receipt partitions = 0
released = none | commits = none | owns = 1

## runs_of_lost_partitions_are_left_by_default
at_work 1 BASE | lose 0 7
state run1 = STARTED | outcomes = none

## runs_of_lost_partitions_are_cancelled_if_configured
at_work 1 CANCEL_LOST | lose 0 7
state run1 = CANCELING | outcomes = none

## runs_of_a_lost_partition_are_cancelled_while_it_restores
at_work 1 CANCEL_LOST | fails ReadRuns | elect 0 | wait 5 | lose 0
state run1 = CANCELING
"""
LEAVES = """
## leave_drains_all_partitions_and_closes_the_member
at_work 2 BASE | leave "a reload" | leave again | succeed run1 | wait 2
left = no | held = none
succeed run2 | wait 1
left = a reload | outcomes = leave drained | released = none

## leave_ends_at_its_limit
at_work 1 BASE | leave shutdown 8 | wait 7.75
left = no
wait 0.25
left = shutdown

## leave_without_time_ends_at_once
at_work 1 BASE | leave shutdown 0
left = no
wait 0.25
left = shutdown

## leave_takes_no_longer_than_a_hold
at_work 1 BASE | leave shutdown 500 | wait 29.75
left = no
wait 0.25
left = shutdown

## leave_for_a_successor_commits_finished_work_and_hands_over_runs
at_work 2 BASE | succeed run1 | leave "a reload" successor | wait 1
left = a reload | commits = 0:100 | outcomes = leave handed over
receipt cancelled = none | receipt handed_over = 1
receipt text ~ 2 runs still working; unfinished claim on orders-1 goes to the next owner
join heir 2
state run2 = STARTED | live 1 = run2

## open_revoke_is_handed_over_with_the_leave_for_a_successor
# Kafka revokes a share of the partitions as soon as the successor joins.
at_work 2 BASE | revoke 1 | wait 1 | leave "a reload" successor | wait 1
outcomes = revoke handed over, leave handed over | state run1 = STARTED | state run2 = STARTED

## queued_run_is_not_cancelled_for_a_successor
join m 1 BASE | tick | wait 1 | leave "a reload" successor | wait 0.25
left = a reload | state run1 = WAITING

## leave_with_policy_drain_waits_for_runs_in_spite_of_a_successor
at_work 1 DRAIN | leave "a reload" successor | wait 5
left = no
succeed run1 | wait 1
outcomes = leave drained

## hand_over_waits_for_dagster_no_longer_than_for_the_last_commit
at_work 1 BASE | fails ReadRuns | succeed run1 | leave "a reload" successor | wait 4.75
left = no | summary ~ handing over to the successor orders-0
wait 0.25
left = a reload | claims 0 = 100:b1

## later_request_with_a_limit_shortens_a_leave
at_work 1 BASE | leave "its sensor is off" | wait 10 | leave shutdown 8 | wait 8
left = its sensor is off

## later_request_with_a_successor_shortens_a_leave
at_work 1 BASE | leave "its sensor is off" | wait 10 | leave "a reload" successor | wait 8
left = its sensor is off

## later_request_does_not_prolong_a_leave
at_work 1 BASE | leave shutdown 8 | wait 4 | leave "its sensor is off" | wait 4
left = shutdown

## leave_without_partitions_is_immediate_and_has_no_receipt
world 0 | join m 0 | leave shutdown
left = shutdown | outcomes = none

## leave_with_lost_partitions_ends_with_one_receipt
at_work 1 BASE | leave "a reload" | lose 0
left = a reload | outcomes = leave lost | commits = none

## partition_revoked_in_a_leave_is_released_as_soon_as_it_is_drained
at_work 2 BASE | leave "a reload" 20 | wait 1 | revoke 0 | succeed run1 | wait 1
released = 0 | left = no
succeed run2 | wait 1
left = a reload | outcomes = revoke drained, leave drained
receipt partitions 0 = 0 | receipt partitions 1 = 0 1

## limit_of_a_leave_also_ends_the_hold_of_a_revoke
at_work 1 BASE | leave shutdown 8 | wait 2 | revoke 0 | wait 6
left = shutdown | released = 0 | outcomes = revoke deadline, leave deadline
state run1 = CANCELING

## partition_assigned_in_a_leave_is_never_worked_on
at_work 1 BASE | leave "a reload" | produce 5 100 | mark ReadStoredOffsets | mark WriteOffsets
assign 5
given ReadStoredOffsets = 0 | given WriteOffsets = 0
revoke 5
released = 5
succeed run1 | wait 1
left = a reload | offset 5 = none

## member_without_ticks_drains_and_leaves
at_work 1 SHORT_LEASE | wait 58
phase = OWNED
wait 3
phase = DRAINING
succeed run1 | wait 1
offset 0 = 100 | left ~ its sensor has not ticked for 6
"""


@stories(REVOKES + CANCELS + DEADLINES + LOSSES + LEAVES)
def test_hold(story: str) -> None:
    play(story, SETTINGS)


def test_hold_that_lasts_a_second_is_shown_once() -> None:
    member = play("at_work 2 BASE | revoke 0 | wait 0.5 | given ShowHold = 0", SETTINGS).member
    member.world.wait(5, member)
    (shown,) = [command for command in member.done if isinstance(command, commands.ShowHold)]
    assert (shown.cause, shown.partitions, shown.run_ids) == (Cause.REVOKE, (tp(0),), ("run1",))
    assert str(shown) == "revoke of orders-0: waiting for 1 run, at most 29 s"


@pytest.mark.parametrize(("runs", "what"), [((), "the commit"), (("a", "b"), "2 runs")])
def test_show_hold_names_the_runs_that_the_hold_waits_for(runs: tuple[str, ...], what: str) -> None:
    assert f"waiting for {what}" in str(commands.ShowHold(Cause.LEAVE, (tp(0),), runs, 10.0))


def test_commit_in_hold_records_the_drain_time() -> None:
    script = play("at_work 1 BASE | revoke 0 | wait 5 | succeed run1 | wait 0.25", SETTINGS)
    assert script.world.dagster.recorded[0].drain_s == 5.25


@pytest.mark.parametrize("kind", ["ReadStoredOffsets", "ReadRuns"])
def test_revoke_of_a_restoring_partition_waits_for_its_run(kind: str) -> None:
    """A new leader was elected, and brokers or Dagster are slow to answer."""
    story = """
        at_work 1 BASE | fails KIND | elect 0 | wait 5
        phase = RESTORING
        revoke 0 | answers | wait 5
        released = none
        succeed run1 | wait 1
        outcomes = revoke drained | receipt committed = 0:100 | receipt run_ids = run1
        recorded = 0[0,100) run1
    """
    play(story.replace("KIND", kind), SETTINGS)


def test_kept_partitions_continue_in_a_hold() -> None:
    script = play("at_work 2 BASE | revoke 0", SETTINGS)
    run_id = "run2"
    for _ in range(3):
        script.play(f"succeed {run_id} | produce 1 10 | tick | wait 2 | tick STARTED")
        (run_id,) = script.made
    script.play("commits = 1:100, 1:110, 1:120 | released = none")


def test_run_that_appears_in_the_queue_in_a_hold_is_cancelled() -> None:
    """A tick handed the request out right before the revoke."""
    script = play("world 100 2 | join m 2 BASE", SETTINGS)
    first, second = script.member.engine.batch_requests
    script.world.dagster.request(first, RunState.STARTED)
    script.do_wait("1")
    script.do_revoke("0", "1")
    late = script.world.dagster.request(second)
    script.do_wait("1")
    script.play(f"state {late} = CANCELED")


def test_unconfirmed_commit_is_dropped_at_the_limit() -> None:
    """Its late answer must not reach a partition that was given up."""
    script = play(
        "at_work 1 BASE | leave shutdown | succeed run1 | fails WriteOffsets | wait 29", SETTINGS
    )
    pending = script.member.engine.partitions[tp(0)].pending
    assert pending is not None
    script.do_wait("1")
    script.do_mark("WriteOffsets")
    late = events.OffsetsWritten((), ((pending.write, events.WriteFailure.CHANGED),))
    script.member.feed(late)
    script.play("left = shutdown | wait 5 | given WriteOffsets = 0 | phase = DRAINED")


def test_run_is_waited_for_after_another_client_has_moved_the_offset() -> None:
    """Nothing is committed over the new offset."""
    script = play("at_work 1 BASE | revoke 0", SETTINGS)
    owned = script.member.engine.partitions[tp(0)]
    pending = owned.claim_write("b9", 500, script.world.now)
    script.member.engine.partitions[tp(0)] = owned._replace(pending=pending)
    failed = ((pending.write, events.WriteFailure.CHANGED),)
    script.member.feed(events.OffsetsWritten((), failed))
    script.play("wait 5 | released = none | succeed run1 | wait 2 | released = 0 | commits = none")


def test_memory_is_flat_over_a_thousand_rebalances() -> None:
    world = World(records=0, partitions=3)
    member = world.member()
    for _ in range(1000):
        member.feed(events.PartitionsAssigned((tp(0), tp(1), tp(2))))
        for number in range(3):
            world.kafka.produce(tp(number), 5)
        member.feed(events.TickArrived())
        world.wait(1, member, step=1)
        assert member.tick(state=RunState.STARTED)
        world.wait(1, member, step=1)
        member.feed(events.RevokeRequested((tp(0), tp(1))))
        member.feed(events.PartitionsLost((tp(2),)))
        for run_id in world.dagster.runs:
            if world.dagster.runs[run_id].state is RunState.STARTED:
                world.dagster.move(run_id, RunState.FAILED, is_cancelled_by_member=True)
        world.wait(1, member, step=1)
        world.dagster.runs.clear()
        world.dagster.keys.clear()
        member.done.clear()
    engine = member.engine
    assert (dict(engine.partitions), engine.holds) == ({}, ())
    assert (engine.batch_requests, engine.held) == ((), frozenset())
    member.feed(events.RunsRead(frozenset(), ()))
    assert engine.liveness.tracked == {}
