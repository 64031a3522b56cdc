"""Streaming runs: a member that works on its batches itself, with the same engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings, HoldBudget
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.claims import Claim, StoredPartition, encode
from dagster_rebalance.core.model.offsets import Log
from dagster_rebalance.core.model.run_snapshot import BatchRequest, RunState
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.retry import RetryBackoff
from dagster_rebalance.core.runs.stream_batch import BatchOutcome, StreamBatch, is_claimed_by
from dagster_rebalance.core.streaming.batch_tracker import BatchTracker
from tests.core.story import play
from tests.core.streams import Stream
from tests.core.world import World, span, tp
from tests.story import stories

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import OffsetRange

MINUTE = RetryBackoff(60.0, 60.0)
SETTINGS = {
    "TEN_SECONDS": EngineSettings(backoff=RetryBackoff(10.0, 10.0)),
    "MINUTE": EngineSettings(backoff=MINUTE),
    "NEW_CODE": EngineSettings(backoff=MINUTE, code_version="v2"),
    "SHORT_HOLD": EngineSettings(budget=HoldBudget(10.0, 2.0)),
    "HOLD": EngineSettings(budget=HoldBudget(30.0, 5.0)),
    "LOOKS": EngineSettings(bounds_s=0.1, idle_bounds_s=0.5),
    "SEPARATE": EngineSettings(limits=BatchLimits(max_ranges_per_run=1)),
    "AHEAD": EngineSettings(limits=BatchLimits(max_records_per_range=5), claims_ahead=True),
}

BATCHES = """
## available_partitions_are_one_batch_and_the_next_one_follows_its_commit
world 5 3 | stream r1 0,1,2 | turn
work = 0[0,5) 1[0,5) 2[0,5) | claims 0 = 5:s.r1.1.1
produce 1 2 | turn 1 | end
offset 0 = 5 | offset 1 = 5 | offset 2 = 5 | work = none
turn 1
work = 1[5,7)

## failed_range_is_retried_alone_after_its_delay_and_new_records_take_turns
world 5 2 | stream r1 0,1 TEN_SECONDS | turn | end FAILED | produce 0 1 | turn 1
work = none
turn 10 | until_work 0.25
work = 0[0,5) | claims 0 = 5:s.r1.2.2
claims 1 = 5:s.r1.1.1  # not begun, so not written
summary ~ orders-1: [0, 5): next, after the current batch (attempt 2)
end | until_work 0.25 | work = 1[0,5) | end | until_work 0.25 | work = 0[5,6) | end
offset 0 = 6 | offset 1 = 5

## new_records_of_other_partitions_are_processed_during_a_delay
world 5 | produce 1 0 | stream r1 0,1 MINUTE | turn | end FAILED | produce 1 3 | until_work 1
work = 1[0,3)

## runs_are_read_at_their_interval_although_more_can_be_claimed
world 5 | stream r1 0 | turn | produce 0 9 | turn 1 5 | mark ReadRuns | turn 0.25 80
between ReadRuns 18 21 = True | work = 0[0,5)

## streaming_run_needs_no_ticks
world 0 | stream r1 0 | wait 7200 | produce 0 3 | until_work 1
work = 0[0,3)

## range_with_a_failed_attempt_after_interruptions_has_no_interruptions
world 5 | stream r1 0 | until_work 0.25 | end INTERRUPTED | until_work 0.25 | end INTERRUPTED
until_work 0.25 | end FAILED | until_work 0.25
claims 0 = 5:s.r1.4.2
"""
TAKE_OVERS = """
## stopped_range_stays_stopped_for_its_next_owner
world 5 | stream r1 0 | until_work | end FAILED | until_work | end FAILED | until_work | end FAILED
phase = STOPPED
revoke 0 | turn 0.25 20 | stream r2 | assign 0 | turn
phase = STOPPED
reason ~ 3 attempts on orders-0 [0, 5) failed, the last one in streaming run r1
notes ~ s.r1.3.3:FAILED

## claim_of_a_dead_run_is_the_next_attempt_of_its_begun_ranges
world 5 2 | stream r1 0,1 | turn | stream r2 | move r1 r2 0 1 | turn
work = none  # the first run may work on it
die r1 | turn 2 | until_work 0.25
work = 0[0,5)  # from the second attempt on, each range is alone
claims 0 = 5:s.r2.1.2 | claims 1 = 5:s.r1.1.1
end | until_work 0.25 | end
offset 0 = 5 | offset 1 = 5

## success_of_a_run_that_lost_its_partition_is_committed_by_the_next_owner
world 5 | stream r1 0 | turn | stream r2 | move r1 r2 0 | as r1
interrupts = 1
end | as r2 | turn 1 4
work = none | offset 0 = 5

## claim_of_a_live_run_takes_no_room_from_other_batches
world 5 2 | stream r1 0 | turn | stream r2 | move r1 r2 0 | assign 1 | until_work 0.25
work = 1[0,5)

## frozen_run_is_ended_before_its_claim_is_retried
world 5 | stream r1 0 | turn | stream r2 | move r1 r2 0 | turn 1 50
work = none
turn 1 40
ended ~ r1:1

## range_with_five_interruptions_in_a_row_waits_for_its_delay_unless_the_code_is_new
world 5 | stream r0 | die r0 | claim 0 5 s.r0.4000000007.1 INTERRUPTED
stream r1 0 MINUTE | turn 2 | turn 10
work = none
stream r2 "" NEW_CODE | move r1 r2 0 | until_work 2
work = 0[0,5)

## range_whose_process_died_waits_unless_the_code_is_new
world 5 | stream r1 0 MINUTE | turn | die r1 | stream r2 "" MINUTE | stream r3 "" NEW_CODE
move r1 r2 0 | turn 2 | turn 10
work = none
move r2 r3 0 | until_work 2
work = 0[0,5)

## streaming_run_cancels_an_unsubmitted_run_and_takes_its_batch
# The sensor that could submit it is off.
world 5 | join m 1 | tick CREATED | attempt run1 1 | stream r1 | move m r1 0 | turn
given CancelRuns = 1
run run1 CANCELED is_cancelled_by_member=1 | until_work 1
work = 0[0,5)

## sensor_takes_over_the_batches_of_a_streaming_run
world 5 | stream r1 0 | turn | join m 0 | move r1 m 0 | tick
made = none
die r1 | wait 2 | tick
made = run1 | requests ~ s.r1.1.1
start run1 | succeed run1 | wait 2
offset 0 = 5

## run_of_a_sensor_for_a_batch_of_the_worker_is_waited_for
world 5 | stream r1 0 | turn | join m 0 | move r1 m 0 | as r1 | end INTERRUPTED
as m | wait 2 | tick | start run1 | move m r1 0 | turn 1 8
work = none
succeed run1 | turn 1 4
work = none | offset 0 = 5

## re_executed_run_that_read_the_claim_before_the_take_over_is_waited_for
world 5 | join m 1 | tick STARTED | run run1 CANCELED is_cancelled_by_member=1
stream r1 | as m | lose 0
as r1 | fails WriteOffsets | assign 0 | add b1 0 0 5 STARTED | start run2 | answers | turn 1 8
work = none | claims 0 = 5:s.r1.1.1
succeed run2 | done s.r1.1.1 0 0 5 | turn 1 4
work = none | offset 0 = 5

## run_that_is_deleted_while_its_range_is_committed_does_not_end_the_member
world 5 | join m 1 | tick STARTED | run run1 CANCELED is_cancelled_by_member=1
stream r1 | as m | lose 0
as r1 | fails WriteOffsets | assign 0 | add b1 0 0 5 STARTED | answers | turn 1 4
work = none | claims 0 = 5:s.r1.1.1
succeed run2 | done s.r1.1.1 0 0 5 | fails WriteOffsets | turn 1 8
work = none | committing = True
delete run2 | turn 1 8
work = none | offset 0 = 0
answers | turn 1 8
work = none | offset 0 = 5

## re_executed_run_that_reads_the_claim_after_the_take_over_refuses_itself
world 5 | join m 1 | tick STARTED | run run1 CANCELED is_cancelled_by_member=1
stream r1 | move m r1 0
until_work 0.25 | add b1 0 0 5 STARTED | refuse run2

## success_for_the_former_batch_outlives_the_run_that_took_the_claim_over
# The claim names its former batch until the runs of that batch were read.
world 5 | join m 1 | tick STARTED | run run1 STARTED heartbeat=1 | stream r1 | stream r2 | as m
lose 0 | claim 0 5 s.r1.1.1 "" b1 | succeed run1 | die r1 | done s.r1.1.1 0 0 5
as r2 | assign 0 | turn 1 4
work = none | offset 0 = 5

## claim_waits_for_the_write_before_it
world 5 | stream r1 0 | turn | lose 0 | end INTERRUPTED | topic_id made-later | stream r2
unanswered WriteOffsets | assign 0 | turn 0.1
work = none | claims 0 = 5:s.r1.1.1
answers | turn 2 | until_work 0.25
claims 0 = 5:s.r2.1000000001.1

## batch_with_unwritten_claims_is_not_begun
world 5 2 | stream r1 0,1 | turn | stream r2 | move r1 r2 0 1 | as r1 | end INTERRUPTED | as r2
fails WriteOffsets | turn 2 | turn 0.1
work = none
answers | turn 2
work = 0[0,5) 1[0,5)

## reported_batch_id_is_never_begun_again
world 5 | stream r1 0 | turn | lose 0 | end INTERRUPTED | assign 0 | until_work 1
claims 0 = 5:s.r1.1000000002.1
stream r2 | move r1 r2 0 | turn 1 6
work = none

## reported_success_is_not_repeated_when_the_partition_returns
world 5 | stream r1 0 | turn | lose 0 | end SUCCEEDED | turn | assign 0 | turn 1
work = none | offset 0 = 5
"""
HOLDS = """
## revoke_waits_for_the_current_batch_and_other_partitions_continue
world 5 2 | stream r1 0,1 | turn | revoke 1 | turn
held = 1 | work = 0[0,5) 1[0,5)
produce 0 1 | end
held = none | offset 0 = 5 | offset 1 = 5
until_work 1
work = 0[5,6)

## batch_that_outlives_its_hold_is_interrupted_and_its_outcome_reported
world 5 | stream r1 0 SHORT_HOLD | turn | revoke 0 | wait 8.5
interrupts !~ 0
wait 2 | stream r2 | assign 0 | turn
work = none | notes = none  # it still works
as r1 | end INTERRUPTED
notes = s.r1.1.1:INTERRUPTED
as r2 | turn 2 | until_work 0.25
work = 0[0,5) | claims 0 = 5:s.r2.1000000001.1

## leave_whose_batch_another_hold_interrupted_did_not_drain
world 5 | stream r1 0 HOLD | turn | leave "a signal" 60 | end INTERRUPTED | wait 1
outcomes = leave deadline | receipt handed_over = 0

## leave_waits_for_the_current_batch
world 5 2 | stream r1 0,1 | turn | leave "asked to" 30 | turn 1
left = no
end | turn
left = asked to | notes = none | offset 0 = 5 | offset 1 = 5
"""
STOPS = """
## stopped_range_is_retried_at_once_by_the_run_of_a_deploy
world 5 | stream r1 0 | until_work | end FAILED | until_work | end FAILED | until_work | end FAILED
revoke 0 | turn 0.25 20 | stream r2 "" MINUTE | assign 0 | until_work 0.25
work = 0[0,5) | phase = STOPPED | shown = 0 stopped
reason ~ 3 attempts on orders-0 [0, 5) failed, the last one in streaming run r1
stream r3 0 | turn
reason ~ the last one in streaming run r1
as r2 | end FAILED
reason ~ 4 attempts on orders-0 [0, 5) failed, the last one in streaming run r2
turn 30
work = none

## ranges_are_retried_together_after_one_interruption_and_alone_after_two
world 5 2 | stream r1 0,1 | turn | end INTERRUPTED | turn
work = 0[0,5) 1[0,5)
end INTERRUPTED | turn 1 | until_work 10
work = 0[0,5)
end SUCCEEDED | turn 1 | until_work 10
work = 1[0,5)
"""
REPEATS = """
## new_records_are_no_repeat
world 15 2 | stream r1 0,1 AHEAD | until_work
repeat = False
turn 1 4 | return
work = 0[5,10) 1[5,10) | repeat = False
end | until_work
work = 0[10,15) 1[10,15) | repeat = False

## batch_that_an_operator_stopped_is_repeated_after_a_resume
world 5 | stream r1 0 | until_work | order STOP | turn 4 | end DROPPED
order RESUME | turn 4 | until_work
batch ~ .1 | repeat = True

## other_ranges_of_a_stopped_batch_are_repeated
world 5 2 | stream r1 0,1 | until_work | order STOP | turn 4 | end DROPPED | until_work 0.25
work = 1[0,5) | repeat = True

## batch_that_was_claimed_ahead_and_had_begun_is_repeated_by_the_next_owner
world 5 | produce 1 0 | stream r1 0,1 AHEAD | turn | produce 1 5 | turn 2 2 | return
work = 1[0,5) | repeat = False | early 1 = 5
die r1 | stream r2 "" AHEAD | move r1 r2 0 1 | until_work
work = 1[0,5) | batch = s.r2.1.1 | repeat = True

## batch_of_a_run_that_left_no_outcome_is_repeated_by_the_next_owner
world 5 | stream r1 0 | until_work | terminate r1 | stream r2 | move r1 r2 0 | until_work
batch = s.r2.1.1 | repeat = True

## failed_batch_and_interrupted_batch_are_repeated
world 5 | stream r1 0 | until_work | end FAILED | until_work
batch = s.r1.2.2 | repeat = True
end INTERRUPTED | until_work
repeat = True
end | produce 0 5 | until_work
work = 0[5,10) | repeat = False
"""


@stories(BATCHES + TAKE_OVERS + HOLDS + STOPS + REPEATS)
def test_streaming(story: str) -> None:
    play(story, SETTINGS)


def test_ranges_that_shared_a_batch_with_a_killer_are_not_counted_as_attempts() -> None:
    world = World(records=5, partitions=3)
    stream = Stream(world, "r1", owns=range(3))
    everything = tuple(map(tp, range(3)))
    for name in ("r2", "r3", "r4", "r5"):
        stream.turn()
        stream.turn()
        if stream.work.at_work is None or span(0, 0, 5) not in stream.work.at_work.ranges:
            break
        stream.die()
        stream.feed(events.PartitionsLost(everything))
        stream = Stream(world, name)
        stream.feed(events.PartitionsAssigned(everything))
    for _ in range(6):
        if stream.work.at_work is not None:
            stream.end()
        stream.turn()
    assert stream.engine.partitions[tp(0)].phase is Phase.STOPPED
    assert (world.kafka.offset(1), world.kafka.offset(2)) == (5, 5)


def test_five_interruptions_in_a_row_stop_the_partition_until_a_success() -> None:
    script = play("world 5 2 | stream r1 0,1 | turn | end INTERRUPTED | turn")
    for _ in range(12):
        batch = script.stream.work.at_work
        if batch is not None:
            is_bad = span(0, 0, 5) in batch.ranges
            script.do_end("INTERRUPTED" if is_bad else "SUCCEEDED")
        script.do_turn()
    script.play("""
        offset 1 = 5 | phase = STOPPED | reason ~ in a row on orders-0 [0, 5) were interrupted
        until_work 0.25 | end
        phase = OWNED | offset 0 = 5
    """)


def test_interruptions_of_a_range_count_across_its_owners() -> None:
    script = play("world 5 | stream r0 0 | turn")
    for number in range(1, 6):
        script.play(f"""
            work = 0[0,5) | stream r{number} | move r{number - 1} r{number} 0
            as r{number - 1} | end INTERRUPTED | as r{number} | turn 2 | turn
        """)
    script.play("phase = STOPPED | reason ~ the last one by streaming run r4")


def test_failed_range_stops_after_its_attempts_although_the_partition_moves() -> None:
    script = play("world 5 | stream r1 0")
    for _ in range(3):
        script.play("until_work 1 | end FAILED | lose 0 | turn | assign 0 | turn 0")
    script.play("phase = STOPPED")


def test_batch_that_an_operator_stopped_is_dropped() -> None:
    work = BatchTracker("r1")
    request = BatchRequest("s.r1.1.1", 1, (span(0, 0, 5),))
    work.begin([request], {"s.r1.1.1"}, lambda _: Log())
    work.mark_unwanted()
    work.interrupt(1.0)
    ended = work.end(BatchOutcome.INTERRUPTED)
    assert ended is not None
    assert ended.outcome is BatchOutcome.DROPPED


def test_restoring_partition_keeps_the_delays_of_its_ranges() -> None:
    script = play("world 5 | stream r1 0 MINUTE | turn | end FAILED | turn 30", SETTINGS)
    (before,) = script.stream.engine.partitions[tp(0)].entries
    script.play("elect 0 | turn 2 2 | phase = OWNED")
    (after,) = script.stream.engine.partitions[tp(0)].entries
    assert (after.due_at, after.claimed_at) == (before.due_at, None)


def test_frozen_run_is_ended_while_other_batches_continue() -> None:
    script = play("world 5 2 | stream r1 0 | turn | stream r2 | move r1 r2 0 | assign 1")
    for _ in range(80):
        script.do_produce("1", "1")
        if script.stream.turn(1.0):
            script.do_end()
    script.play("ended ~ r1")


def test_streaming_run_takes_over_the_batches_of_a_sensor() -> None:
    script = play("world 5 3 | join m 3 SEPARATE | tick STARTED", SETTINGS)
    working, *others = script.made
    script.play("stream r1 | move m r1 0 1 2")
    for run_id in others:
        script.play(f"run {run_id} CANCELED is_cancelled_by_member=1")
    script.play(f"run {working} STARTED heartbeat=1")
    done: list[OffsetRange] = []
    for _ in range(6):
        if script.stream.turn(1.0) is not None:
            done.extend(script.stream.end().ranges)
    assert done
    assert not set(done) & set(script.world.dagster.runs[working].ranges)
    script.play(f"succeed {working} | turn 1 3 | offset 0 = 5 | offset 1 = 5 | offset 2 = 5")


def test_claim_with_thousands_of_attempts_counts_as_a_thousand() -> None:
    """A range that is stopped for months has them, and other clients can write them."""
    world = World(records=5)
    Stream(world, "r0").die()
    world.kafka.stored[tp(0)] = encode(StoredPartition(0, (Claim(5, "s.r0.7.4000"),)))
    stream = Stream(world, "r1", owns=range(1), backoff=RetryBackoff(1.0, 5.0))
    seen_as = stream.stream_runs(["s.r0.7.4000"], [("s.r0.7.4000", span(0, 0, 5))])
    assert len(seen_as) == 1001
    for outcome in (BatchOutcome.FAILED, BatchOutcome.FAILED, BatchOutcome.SUCCEEDED):
        while stream.turn(1.0) is None:
            assert world.now < 2_000
        stream.end(outcome)
    stream.turn()
    assert world.kafka.offset(0) == 5


def test_idle_streaming_run_reads_end_offsets_rarely() -> None:
    script = play("world 5 | stream r1 0 LOOKS", SETTINGS)
    stream = script.stream

    def reads(seconds: float) -> int:
        before = len(stream.given(commands.ReadBounds))
        script.world.wait(seconds, stream, step=0.1)
        return len(stream.given(commands.ReadBounds)) - before

    stream.turn()
    stream.end()
    assert reads(2.0) >= 18
    reads(1.0)
    assert reads(5.0) <= 10


def test_streaming_run_reads_end_offsets_rarely_while_a_batch_is_running() -> None:
    """No claim follows before the end of the batch; it then covers all records up to that end."""
    script = play("world 5 2 | stream r1 0,1 LOOKS | turn", SETTINGS)
    stream = script.stream
    before = len(stream.given(commands.ReadBounds))
    script.do_produce("0", "1")
    script.world.wait(10.0, stream, step=0.1)
    assert 4 <= len(stream.given(commands.ReadBounds)) - before <= 6
    script.do_produce("1", "2")
    script.world.wait(1.0, stream, step=0.1)
    stream.end()
    begun = stream.turn()
    assert begun is not None
    assert begun.ranges == (span(0, 5, 6), span(1, 5, 7))


def refuse(stream: Stream, number: int, *, claims_only: bool) -> None:
    """Kafka refuses writes for a partition: all, or those with claims."""
    stored = stream._written

    def written(writes: tuple[commands.OffsetWrite, ...]) -> events.Event | None:
        bad = tuple(
            write
            for write in writes
            if write.partition == tp(number) and (write.new.metadata or not claims_only)
        )
        answer = stored(tuple(write for write in writes if write not in bad))
        assert isinstance(answer, events.OffsetsWritten)
        return replace(answer, refused=tuple((write, "no right") for write in bad))

    stream._written = written  # type: ignore[method-assign]


def test_partition_with_a_refused_claim_does_not_block_others() -> None:
    world = World(records=5, partitions=2)
    stream = Stream(world, "r1", owns=range(2))
    refuse(stream, 1, claims_only=True)
    for _ in range(20):
        world.kafka.produce(tp(0), 1)
        if stream.turn(1.0):
            stream.end()
    assert (world.kafka.offset(0) or 0) > 15
    assert stream.engine.partitions[tp(1)].phase is Phase.STOPPED


@pytest.mark.parametrize("has_left", [True, False])
def test_claim_that_cannot_be_taken_over_does_not_block_others(*, has_left: bool) -> None:
    """It is the claim of a run that has left, or a failed attempt of this run."""
    script = play("world 0 3")
    for number in range(1 if has_left else 3):
        script.do_produce(str(number), "5")
    script.play("stream r1 0,1,2 | turn")
    assert script.stream.work.at_work is not None
    if has_left:
        streams = script.world.streams
        streams["r1"] = replace(streams["r1"], state=RunState.SUCCEEDED)
        script.do_stream("r2")
    refuse(script.stream, 0, claims_only=False)
    if has_left:
        script.play("assign 0 1 2 | turn 1 5 | work = none | produce 1 5 | produce 2 5")
    else:
        script.do_end("FAILED")
    for _ in range(20):
        if script.stream.turn(1.0):
            script.do_end()
    script.play("""
        offset 1 = 5 | offset 2 = 5 | phase = STOPPED
        summary ~ no right
        summary !~ after the current batch
    """)


def test_many_failing_ranges_do_not_block_new_records() -> None:
    world = World(records=5, partitions=5)
    stream = Stream(world, "r1", owns=range(5), backoff=RetryBackoff(1.0, 5.0))
    done = 0
    for _ in range(120):
        world.kafka.produce(tp(4), 1)
        if stream.turn(1.0):
            assert stream.work.at_work is not None
            is_bad = any(range_.partition < 4 for range_ in stream.work.at_work.ranges)
            world.now += 3.0
            stream.end(BatchOutcome.FAILED if is_bad else BatchOutcome.SUCCEEDED)
            done += not is_bad
    assert done > 20


@pytest.mark.parametrize(
    ("run", "outcome", "state"),
    [
        (RunState.STARTED, None, RunState.STARTED),
        (RunState.FAILED, None, RunState.FAILED),
        (RunState.SUCCEEDED, None, RunState.CANCELED),
        (RunState.CANCELED, None, RunState.CANCELED),
        (RunState.STARTED, BatchOutcome.SUCCEEDED, RunState.SUCCEEDED),
        (RunState.FAILED, BatchOutcome.INTERRUPTED, RunState.CANCELED),
        (RunState.STARTED, BatchOutcome.FAILED, RunState.FAILED),
    ],
)
def test_reported_outcome_decides_before_the_state_of_the_run(
    run: RunState, outcome: BatchOutcome | None, state: RunState
) -> None:
    world = World()
    stream = Stream(world, "r1")
    seen_as = replace(world.streams[stream.run_id], state=run)
    *before, now = StreamBatch("r1", 7, 3).as_runs((span(0, 0, 5),), seen_as, outcome)
    assert (now.state, now.attempt, now.ranges) == (state, 3, (span(0, 0, 5),))
    assert [(one.state, one.attempt) for one in before] == [
        (RunState.FAILED, 1),
        (RunState.FAILED, 2),
    ]


def test_run_whose_heartbeat_names_other_partitions_has_dropped_its_batch() -> None:
    """It may not know the claim: a reset may have erased it while the run owned the partition."""
    world = World()
    stream = Stream(world, "r1")
    for named, state in ((frozenset({tp(0)}), RunState.STARTED), (frozenset(), RunState.CANCELED)):
        run = replace(world.streams[stream.run_id], active_partitions=named)
        (now,) = StreamBatch("r1", 7).as_runs((span(0, 0, 5),), run, None)
        assert now.state is state


@pytest.mark.parametrize("text", ["", "b-1", "s.r1.1", "s.r1.1.1.0", "s.r 1.1.1", "s.r1.x.1"])
def test_other_batch_ids_are_not_those_of_streaming_runs(text: str) -> None:
    assert StreamBatch.parse(text) is None
    assert StreamBatch.parse("s.r1.12.3") == StreamBatch("r1", 12, 3)


def test_batch_id_with_interruptions_has_the_form_of_earlier_versions() -> None:
    """In a deploy, a member that cannot read the id would repeat the work of the run."""
    batch = StreamBatch("r1", 12, 3, 4)
    assert str(batch) == "s.r1.4000000012.3"
    assert StreamBatch.parse(str(batch)) == batch


def test_batch_with_more_interruptions_than_its_id_can_hold_is_claimed() -> None:
    batch = StreamBatch("r1", 12, 3, 5_000)
    assert str(batch) == "s.r1.999000000012.3"
    request = BatchRequest(str(batch), 3, (span(0, 0, 5),), interruptions=5_000, is_own=True)
    assert is_claimed_by(request, "r1")


def test_run_that_ended_itself_has_interrupted_its_batch() -> None:
    """Its assets ignored the interruption, and the process was ended with them."""
    world = World()
    stream = Stream(world, "r1")
    ended = replace(
        world.streams[stream.run_id], state=RunState.FAILED, is_cancelled_by_member=True
    )
    (now,) = StreamBatch("r1", 7).as_runs((span(0, 0, 5),), ended, None)
    assert (now.is_interrupted, now.is_cancelled_by_member, now.has_died) == (True, False, False)
    *before, now = StreamBatch("r1", 7, 2, 2).as_runs(
        (span(0, 0, 5),), ended, BatchOutcome.SUCCEEDED
    )
    assert [(one.state, one.is_interrupted) for one in before] == [
        (RunState.FAILED, False),
        (RunState.CANCELED, True),
        (RunState.CANCELED, True),
    ]
