"""Directives: operators pause, stop, resume and retry partitions."""

from __future__ import annotations

from dataclasses import replace

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.engine.dead_letter_policy import is_wanted
from dagster_rebalance.core.engine.directive_cancels import DirectiveCancels
from dagster_rebalance.core.model import commands
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.partitions.owned import OwnedPartition, PendingWrite
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.progress import Exhausted
from dagster_rebalance.core.runs.retry import RetryBackoff
from tests.core.story import play
from tests.core.world import tp
from tests.story import stories

SEPARATE = EngineSettings(limits=BatchLimits(max_ranges_per_run=1))
LETTERS = EngineSettings(max_attempts=1, dead_letter_topic="dead")
SETTINGS = {
    "SEPARATE": SEPARATE,
    "ONE_RUN": EngineSettings(limits=BatchLimits(max_runs_in_flight=1)),
    "FIVE_SECONDS": EngineSettings(max_attempts=1, backoff=RetryBackoff(5.0, 60.0)),
    "LETTERS": LETTERS,
    "LOOKS": EngineSettings(bounds_s=0.25, idle_bounds_s=5.0, poll_s=0.5, lease_s=999.0),
    "SLOW": EngineSettings(backoff=RetryBackoff(600.0, 600.0)),
    "NO_RETRY": replace(
        SEPARATE, max_attempts=1, backoff=RetryBackoff(600.0, 600.0, retry_stopped=False)
    ),
}
SINCE = "since 2023-11-14 22:13:20 UTC: the warehouse is away"

PAUSES = """
## paused_partition_claims_nothing_until_it_is_resumed
world 0 2 | join m 2 SEPARATE | order PAUSE | wait 4 | produce 0 5 | produce 1 5 | wait 4
requests ~ 1[0,5)
requests !~ 0[0,5)
claims 0 = none
order RESUME | wait 4 | tick | requests ~ 0[0,5) | start run1 | start run2

## stopped_partition_claims_nothing_until_it_is_resumed
world 0 2 | join m 2 SEPARATE | order STOP | wait 4 | produce 0 5 | produce 1 5 | wait 4
requests ~ 1[0,5)
requests !~ 0[0,5)
claims 0 = none
order RESUME | wait 4 | tick | requests ~ 0[0,5) | start run1 | start run2

## running_batch_of_a_paused_partition_is_committed
world 5 | join m 1 | wait 0.25 | tick | start run1 | order PAUSE | wait 4
given CancelRuns = 0
succeed run1 | produce 0 5 | wait 4
offset 0 = 5 | claims 0 = none | owns = 0

## unstarted_run_of_a_paused_partition_is_cancelled_and_counts_no_attempt
world 5 | join m 1 | wait 0.25 | tick | order PAUSE | wait 4
state run1 = CANCELED
tick | made = none
order RESUME | wait 4
requests = b1.2 0[0,5) | failures = 0

## stop_cancels_the_running_batch_and_counts_no_attempt
world 5 | join m 1 | wait 0.25 | tick | start run1 | order STOP | wait 4
state run1 = CANCELING | between CancelRuns 1 4 = True
run run1 CANCELED | wait 4 | tick | made = none
order RESUME | wait 4
requests ~ 0[0,5) | failures = 0

## stop_cancels_a_run_that_blocks_a_restoring_partition
world 100 | join m 1 | tick | start run1 | stored 0 50 | lose 0 | assign 0 | wait 5
blocked = run1
order STOP | wait 4
state run1 = CANCELING

## run_of_several_ranges_is_cancelled_as_a_whole_and_the_others_are_requested_again
world 5 2 | join m 2 ONE_RUN | wait 0.25 | tick | start run1 | order STOP | wait 4
run run1 CANCELED | wait 4
requests ~ 1[0,5)
requests !~ 0[0,5)

## paused_partition_is_revoked_and_its_next_owner_claims_nothing
world 5 | join first 1 | order PAUSE | wait 4 | revoke 0 | wait 4
owns = none
join second 1 | wait 4
explained ~ paused by ada | requests = none

## stop_cancels_a_run_that_a_hold_waits_for
world 5 | join m 1 | wait 0.25 | tick | start run1 | revoke 0 | order STOP | wait 4
state run1 = CANCELING

## partition_is_restored_only_when_the_directives_are_known
world 5 | join m 0 | fails ReadDirectives | assign 0 | wait 4
phase = RESTORING | explained ~ the directives from Dagster | between ReadDirectives 3 99 = True
answers | wait 4
requests = b1.1 0[0,5)

## directives_read_before_the_assignment_are_not_enough
world 5 2 | join m 1 | fails ReadDirectives | assign 1 | wait 4
phase 0 = OWNED | phase 1 = RESTORING

## failed_read_keeps_the_last_known_directives
world 5 2 | order PAUSE | join m 2 SEPARATE | fails ReadDirectives | wait 30 | ticks | wait 1
requests ~ 1[0,5)
requests !~ 0[0,5)

## directives_are_read_every_few_seconds_while_partitions_are_assigned
world 0 | join m 0 | wait 10
given ReadDirectives = 0
assign 0 | wait 30
given ReadDirectives = 11

## exhausted_range_is_not_retried_while_paused
world 5 | join m 1 FIVE_SECONDS | wait 0.25 | tick | start run1 | run run1 FAILED has_started=1
wait 4
phase = STOPPED
order PAUSE | wait 20 | tick | made = none
explained ~ paused by ada | explained ~ stopped: run run1 failed
order RESUME | wait 4 | tick | made = run2

## paused_partition_with_records_is_read_as_rarely_as_an_idle_one
world 5 | join m 1 LOOKS | wait 0.25 | tick | order PAUSE | wait 14
mark ReadBounds | mark ReadRuns | wait 60
between ReadBounds 0 13 = True | between ReadRuns 0 7 = True
"""
STREAMS = """
## streaming_run_leaves_a_paused_partition_out_of_its_batches
world 5 2 | stream r1 0,1 | order PAUSE | turn 4 | end | produce 0 5 | produce 1 5
turn 4 | until_work 1
work = 1[5,10)
end | order RESUME | turn 4 | until_work 1
work = 0[0,5)

## batch_with_a_stopped_partition_is_interrupted_and_the_others_continue
world 5 2 | stream r1 0,1 | until_work | order STOP | turn 4
interrupts = 1
end DROPPED | until_work 0.25
work = 1[0,5) | claims 1 = 5:s.r1.2.1
turn 4
interrupts = 1
end | order RESUME | turn 4 | until_work 0.25
work = 0[0,5)

## claim_that_was_paused_before_its_begin_gets_another_batch_after_the_resume
# The rest of its batch was begun, and no batch id is begun twice.
world 5 2 | stream r1 0,1 | wait 0.25 | order PAUSE | wait 4 | turn
work = 1[0,5) | batch = s.r1.1.1
end | order RESUME | turn 4 | until_work 0.25
work = 0[0,5)
batch !~ s.r1.1.1

## claims_of_other_members_are_not_taken_over_while_paused
world 5 2 | join m 2 | wait 0.25 | order STOP orders | stream r1 0,1 | turn 4 2
work = none | claims 0 ~ :b

## retry_ends_the_delay_of_a_failed_range_once
world 5 | stream r1 0 SLOW | turn | end FAILED | turn 5
work = none
order RETRY orders:7 | turn 5
work = none
order RETRY | turn 4 | until_work 0.25
work = 0[0,5)
end FAILED | turn 5 3
work = none

## retry_does_not_resume_a_paused_partition
world 5 | stream r1 0 SLOW | turn | end FAILED | order PAUSE | order RETRY | turn 4 2
work = none | explained ~ paused by ada

## retry_from_before_the_assignment_is_ignored
world 5 | stream r1 0 SLOW | turn | order RETRY | die r1 | stream r2 0 SLOW | turn 4 2
work = none

## retry_reads_a_stopped_partition_again
world 5 | stored 0 100 | join m 1 | wait 4
phase = STOPPED
order RETRY * | mark ReadStoredOffsets | wait 3.5
between ReadStoredOffsets 1 99 = True

## retry_retries_a_stopped_range_that_is_never_retried_automatically
world 5 2 | join m 2 NO_RETRY | wait 0.25 | tick | start run1 | start run2
run run1 FAILED | run run2 FAILED | wait 4
phase = STOPPED | requests = none
order RETRY | wait 4
requests ~ 0[0,5)
requests !~ 1[0,5)
log ~ orders-0: retried by ada at 2023-11-14 22:13:20 UTC: the warehouse is away
"""


@stories(PAUSES + STREAMS)
def test_directive(story: str) -> None:
    play(story, SETTINGS)


def test_cancellation_names_the_directive() -> None:
    script = play("world 5 | join m 1 | wait 0.25 | tick | start run1 | order STOP | wait 4")
    cancel = script.member.given(commands.CancelRuns)[0]
    assert isinstance(cancel, commands.CancelRuns)
    assert cancel.reason == f"orders:0 was stopped by ada {SINCE}"


def test_cancellation_is_repeated_at_growing_intervals() -> None:
    script = play("world 5 | join m 1 | wait 0.25 | tick | start run1 | order STOP")
    for _ in range(24):
        script.play(f"ticks | run run1 STARTED heartbeat={script.world.now} | wait 5")
    script.play("between CancelRuns 4 11 = True")


def test_dead_letter_waits_for_the_resume_of_its_partition() -> None:
    script = play(
        """
        world 5 | join m 1 LETTERS | wait 0.25 | tick | start run1 | order PAUSE | wait 4
        run run1 FAILED has_started=1 | wait 4
        letters = none
        order RESUME | wait 4
        letters = orders-0-0-5 | offset 0 = 5
        """,
        SETTINGS,
    )
    (letter,) = script.world.kafka.letters
    assert not is_wanted(script.owned()._replace(dead_letter=None), letter)


def test_dead_letter_that_waits_for_its_error_is_dropped_by_a_pause() -> None:
    script = play(
        """
        world 5 | join m 1 LETTERS | fails StoreDeadLetter | wait 0.25 | tick | start run1
        run run1 FAILED has_started=1 | wait 4
        """,
        SETTINGS,
    )
    letter = script.member.given(commands.StoreDeadLetter)[-1]
    assert isinstance(letter, commands.StoreDeadLetter)
    assert is_wanted(script.owned(), letter)
    script.play("order PAUSE | wait 4")
    assert not is_wanted(script.owned(), letter)


def test_explanation_names_the_operator_the_reason_and_the_command_to_resume() -> None:
    script = play(
        "world 5 3 | join m 3 | order PAUSE orders:[01] | order STOP orders:2 bob | wait 4"
    )
    assert script.is_explained().startswith(
        f"orders-0: paused by ada {SINCE}; resume with `dagster-rebalance resume orders:0`; "
    )
    lines = script.is_summary().splitlines()
    resume = "resume with `dagster-rebalance resume 'orders:[01]'`"
    assert f"orders-0, orders-1: paused by ada {SINCE}; {resume}" in lines
    assert any(line.startswith("orders-2: stopped by bob since") for line in lines)


def test_change_is_noted_once_for_all_partitions_of_a_directive() -> None:
    script = play(
        "world 0 3 | join m 3 | order PAUSE orders | wait 4 | order RESUME orders:1 | wait 4"
    )
    notes = script.is_log().splitlines()
    assert f"orders-0..2: paused by ada {SINCE}" in notes
    assert notes[-1] == "orders-1: resumed, and continues where it stopped"


def test_revoke_of_a_restoring_partition_keeps_its_newer_directive() -> None:
    script = play("world 5 | join m 1 | wait 0.25 | order STOP")
    (directive,) = script.world.orders
    before = script.owned()._replace(phase=Phase.OWNED)
    taken_in = before.with_directive(directive)._replace(phase=Phase.RESTORING, previous=before)
    assert taken_in.draining().directive == directive


def test_retry_ends_all_delays_but_not_of_ranges_with_a_dead_letter() -> None:
    script = play(
        "world 5 | stream r1 0 SLOW | turn | end FAILED | order PAUSE | order RETRY | turn 4 2",
        SETTINGS,
    )
    (entry,) = script.owned().entries
    assert entry.due_at == float("-inf"), "it is retried after the resume"
    exhausted = entry._replace(progress=Exhausted(("r1",)), due_at=9.0)
    ledger = script.owned().ledger
    assert ledger is not None
    ledger = ledger._replace(entries=(exhausted,))
    assert ledger.with_all_due(lambda _: False).entries == (exhausted,)
    assert ledger.with_all_due(lambda _: True).entries[0].due_at == float("-inf")


def test_retry_repeats_a_refused_write() -> None:
    script = play("world 5 | stored 0 100 | join m 1 | wait 4")
    write = commands.OffsetWrite(tp(0), 1, None, OffsetAndMetadata(0))
    pending = PendingWrite(write, 5.0, resent_at=7.0, refused="no right")
    tried = script.owned()._replace(pending=pending, ledger=None).with_all_due(lambda _: True)
    assert tried.pending is not None
    assert tried.pending.last_sent_at == float("-inf")


def test_partition_without_a_directive_cancels_nothing() -> None:
    assert list(DirectiveCancels(1.0).due([OwnedPartition(tp(0), 1)], 0.0)) == []
