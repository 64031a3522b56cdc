"""Claims ahead: a streaming run claims its next batch while one is at work."""

from __future__ import annotations

from dagster_rebalance.core.batches.engine_settings import EngineSettings, HoldBudget
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.runs.retry import RetryBackoff
from tests.core.story import play
from tests.story import stories

FIVE = BatchLimits(max_records_per_range=5)
MINUTE = RetryBackoff(60.0, 60.0)
SETTINGS = {
    "AHEAD": EngineSettings(limits=FIVE, claims_ahead=True),
    "AHEAD_MINUTE": EngineSettings(limits=FIVE, claims_ahead=True, backoff=MINUTE),
    "AHEAD_ONCE": EngineSettings(limits=FIVE, claims_ahead=True, max_attempts=1),
    "AHEAD_SHORT_HOLD": EngineSettings(
        limits=FIVE, claims_ahead=True, budget=HoldBudget(10.0, 2.0)
    ),
    "MINUTE": EngineSettings(limits=FIVE, backoff=MINUTE),
    "FIVE": EngineSettings(limits=FIVE),
}

CLAIMS = """
## full_batch_is_claimed_while_one_is_at_work_and_begins_when_it_returns
world 15 2 | stream r1 0,1 AHEAD | turn | turn
work = 0[0,5) 1[0,5) | claims 0 = 5:s.r1.1.1, 10:s.r1.2.1 | early 0 = 10
turn 1 9
claims 1 = 5:s.r1.1.1, 10:s.r1.2.1
return
work = 0[5,10) 1[5,10) | batch = s.r1.2.1
offset 0 = 5 | claims 0 = 10:s.r1.2.1, 15:s.r1.3.1 | early 0 = 15
return | return
work = none | offset 0 = 15 | offset 1 = 15

## next_batch_is_claimed_when_the_worker_is_idle_without_the_setting
world 15 | stream r1 0 FIVE | turn | turn
claims 0 = 5:s.r1.1.1
return | until_work
work = 0[5,10) | claims 0 = 10:s.r1.2.1 | early 0 = none

## batch_that_is_not_full_is_claimed_when_the_worker_is_idle
world 5 2 | stream r1 0,1 AHEAD | turn | produce 0 4 | turn 2 3
claims 0 = 5:s.r1.1.1
return
claims 0 = 9:s.r1.2.1 | early 0 = none

## records_of_all_partitions_together_make_a_batch_full
world 5 3 | stream r1 0,1,2 AHEAD | turn | produce 0 3 | turn 2 2 | produce 1 2 | turn 2 2
claims 0 = 5:s.r1.1.1, 8:s.r1.2.1 | claims 1 = 5:s.r1.1.1, 7:s.r1.2.1 | claims 2 = 5:s.r1.1.1

## partition_without_work_is_claimed_ahead
world 5 | produce 1 0 | stream r1 0,1 AHEAD | turn | produce 1 5 | turn 2 2
work = 0[0,5) | claims 1 = 5:s.r1.2.1 | early 1 = 5
return
work = 1[0,5) | early 1 = 5  # nothing else is written
return
offset 0 = 5 | offset 1 = 5

## one_batch_waits_at_most
world 5 3 | stream r1 0 AHEAD | turn | produce 0 9 | turn 2 2
claims 0 = 5:s.r1.1.1, 10:s.r1.2.1
assign 1 2 | turn 2 5
claims 1 = none | claims 2 = none

## per_batch_member_claims_nothing_ahead
world 15 | join m 1 AHEAD | tick STARTED | wait 5 | tick
claims 0 = 5:b1

## claimed_batch_waits_for_a_claim_that_kafka_has_not_confirmed
world 5 | stream r1 0 AHEAD | turn | produce 0 10 | unanswered WriteOffsets | turn 2 2 | return
work = none
answers | turn 1 3 | until_work
work = 0[5,10) | batch = s.r1.2.1 | offset 0 = 5

## forecast_and_explanation_count_from_the_beginning_of_a_batch
world 15 | stream r1 0 AHEAD | turn | turn 10 | return | turn 2
explained ~ run r1 works on [5, 10) (for 2 s)
return
values OFFSETS_COMMITTED claim_to_commit_s = 10.25, 2.0
"""
FAILURES = """
## ranges_behind_a_failed_range_wait_for_it_and_the_others_begin
world 5 | produce 1 0 | stream r1 0,1 AHEAD_MINUTE | turn | produce 0 5 | produce 1 5 | turn 2 2
work = 0[0,5) | claims 0 = 5:s.r1.1.1, 10:s.r1.2.1 | claims 1 = 5:s.r1.2.1
return FAILED
work = 1[0,5) | batch = s.r1.2.1
summary ~ [5, 10): waits for [0, 5) (attempt 1)
produce 1 5 | return | turn 1
work = 1[5,10)
return | turn 1
work = none | offset 1 = 10 | offset 0 = 0
turn 60 | until_work
work = 0[0,5)
return
work = 0[5,10) | batch = s.r1.2.1 | offset 0 = 5
return
offset 0 = 10

## failed_range_has_no_further_claims_and_other_partitions_continue
world 15 2 | stream r1 0 AHEAD_MINUTE | turn | turn | return FAILED
work = none | claims 0 = 5:s.r1.1.1, 10:s.r1.2.1
assign 1 | until_work 1 | turn
work = 1[0,5) | claims 0 = 5:s.r1.1.1, 10:s.r1.2.1 | claims 1 = 5:s.r1.3.1, 10:s.r1.4.1

## stopped_range_keeps_the_range_behind_it
world 10 | stream r1 0 AHEAD_ONCE | turn | turn | return FAILED | turn 2 3
phase = STOPPED | claims 0 ~ 10:s.r1.2.1

## interrupted_range_is_processed_before_the_range_behind_it
world 10 | stream r1 0 AHEAD | turn | turn | return INTERRUPTED | turn 1
work = 0[0,5)
return
work = 0[5,10)
"""
HOLDS = """
## revoke_waits_for_the_batch_at_work_and_leaves_the_claim_behind_it
world 15 | stream r1 0 AHEAD | turn | turn | revoke 0 | turn
held = 0
return
work = none | held = none | offset 0 = 5 | claims 0 = 10:s.r1.2.1 | early 0 = 10
outcomes = revoke drained | receipt handed_over = 0
stream r2 | assign 0 | until_work
work = 0[5,10) | claims 0 ~ 10:s.r2.1.1

## revoke_of_a_partition_whose_claim_has_not_begun_is_released_at_once
world 5 2 | stream r1 0 AHEAD | turn | assign 1 | turn 2
work = 0[0,5) | claims 1 = 5:s.r1.2.1 | early 1 = 5
revoke 1
held = none | released = 1 | work = 0[0,5)
return
work = none
stream r2 | assign 1 | until_work
work = 1[0,5) | claims 1 = 5:s.r2.1.1

## rest_of_a_claimed_batch_begins_after_a_revoke
world 5 3 | stream r1 0 AHEAD | turn | assign 1 2 | turn 2
claims 1 = 5:s.r1.2.1 | claims 2 = 5:s.r1.2.1
revoke 1 | return
work = 2[0,5)

## paused_partition_is_left_out_of_a_claimed_batch
world 5 3 | stream r1 0 AHEAD | turn | assign 1 2 | turn 2 | order PAUSE orders:1 | turn 4 | return
work = 2[0,5)
return | order RESUME orders:1 | turn 4 | until_work
work = 1[0,5) | claims 1 = 5:s.r1.3.1

## lost_partition_is_left_out_of_a_claimed_batch
world 5 2 | stream r1 0 AHEAD | turn | assign 1 | turn 2 | lose 1 | return
work = none | interrupts = 0

## leave_waits_for_the_batch_at_work_only
world 15 | stream r1 0 AHEAD | turn | turn | leave "asked to" 30 | turn | return | turn
left = asked to | offset 0 = 5 | early 0 = 10

## new_leader_of_a_partition_is_looked_at_before_a_claimed_batch_begins
world 15 | stream r1 0 AHEAD | turn | turn | elect 0 | turn 3 | return | until_work 0.25
work = 0[5,10) | offset 0 = 5
"""
DEATHS = """
## death_is_no_attempt_on_a_claim_that_had_not_begun
world 5 | produce 1 0 | stream r1 0,1 AHEAD | turn | produce 0 5 | produce 1 5 | turn 2 2
claims 0 = 5:s.r1.1.1, 10:s.r1.2.1 | claims 1 = 5:s.r1.2.1 | early 0 = 10 | early 1 = 5
die r1 | stream r2 "" MINUTE | move r1 r2 0 1 | until_work 2
work = 1[0,5) | claims 1 = 5:s.r2.1.1  # without a delay
summary ~ run r1 for [0, 5) failed; next try (attempt 2)
return | turn 60 | until_work
work = 0[0,5)
return | until_work
work = 0[5,10) | claims 0 = 10:s.r2.3.1

## death_is_an_attempt_once_the_commit_before_the_batch_is_stored
world 15 | stream r1 0 AHEAD | turn | turn | return
work = 0[5,10) | early 0 = 15
die r1 | stream r2 "" MINUTE | move r1 r2 0 | turn 2 5
work = none | summary ~ run r1 for [5, 10) failed
summary ~ [10, 15): waits for [5, 10)

## claim_that_a_run_took_over_as_early_counts_only_the_death_of_that_run
world 5 | stream r1 | die r1 | stream r2 | die r2 | claim 0 5 s.r2.1.1 "" s.r1.2.0
early 0 = 5
stream r3 0 AHEAD_MINUTE | turn 1 5
work = none | explained ~ run r2 for [0, 5) failed; next run (attempt 2)
turn 60 | until_work
claims 0 = 5:s.r3.1.2

## claim_that_a_run_took_over_as_early_and_dropped_has_no_attempt
world 5 | stream r1 | die r1 | stream r2 | claim 0 5 s.r2.1.1 DROPPED s.r1.2.0
stream r3 0 AHEAD_MINUTE | until_work
claims 0 = 5:s.r3.1.1 | early 0 = none

## reported_failure_of_a_batch_that_was_claimed_ahead_counts
world 15 | stream r1 0 AHEAD_MINUTE | turn | turn | return | return FAILED | turn
early 0 = 15 | die r1 | stream r2 "" MINUTE | move r1 r2 0 | turn 2 5
work = 0[5,10) | claims 0 = 10:s.r2.1.2, 15:s.r1.3.1
"""


@stories(CLAIMS + FAILURES + HOLDS + DEATHS)
def test_claims_ahead(story: str) -> None:
    play(story, SETTINGS)
