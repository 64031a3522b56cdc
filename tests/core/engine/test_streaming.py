"""A streaming run: a member that works on its batches itself, through its own engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.batches.settings import EngineSettings, HoldBudget
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.claims import Claim, StoredPartition, encode
from dagster_rebalance.core.model.offsets import Log
from dagster_rebalance.core.model.receipt import Outcome as ReceiptOutcome
from dagster_rebalance.core.model.run import RunState
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.reporting.explain import summary
from dagster_rebalance.core.runs.batch_request import BatchRequest
from dagster_rebalance.core.runs.retry import RetryPace
from dagster_rebalance.core.runs.stream_batch import Outcome, StreamBatch, is_claimed_by
from dagster_rebalance.core.streaming.stream_worker import Worker
from tests.core.streams import Stream
from tests.core.world import Member, World, span, tp

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import OffsetRange


def move(world: World, source: Member, target: Member, *numbers: int) -> None:
    """Kafka moves partitions, and the source releases them in order."""
    partitions = tuple(tp(number) for number in numbers)
    source.feed(events.RevokeRequested(partitions))
    for _ in range(20):
        source.pass_time()
        world.now += 0.25
    target.feed(events.PartitionsAssigned(partitions))


def lose(source: Member, target: Member, *numbers: int) -> None:
    """Kafka takes partitions away and gives them to another member."""
    partitions = tuple(tp(number) for number in numbers)
    source.feed(events.PartitionsLost(partitions))
    target.feed(events.PartitionsAssigned(partitions))


def test_all_ready_partitions_are_one_batch_and_the_next_one_follows_its_commit() -> None:
    """A micro-batch: what came meanwhile is the next one."""
    world = World(records=5, partitions=3)
    stream = Stream(world, "r1", owns=range(3))
    begun = stream.turn()
    assert begun is not None
    assert begun.ranges == (span(0, 0, 5), span(1, 0, 5), span(2, 0, 5))
    world.kafka.produce(tp(1), 2)
    assert stream.turn(1.0) is None
    stream.end()
    assert [world.kafka.offset(number) for number in range(3)] == [5, 5, 5]
    following = stream.turn(1.0)
    assert following is not None
    assert following.ranges == (span(1, 5, 7),)


def test_the_id_of_a_batch_names_its_run_and_its_attempt() -> None:
    """Whoever finds the claim knows whom to ask."""
    world = World(records=5)
    stream = Stream(world, "r1", owns=[0])
    stream.turn()
    assert world.kafka.claims(0) == [(5, "s.r1.1.1")]


def test_a_range_that_fails_is_tried_again_alone_under_the_next_attempt() -> None:
    """Each attempt is written before it begins, and after its delay; the others go on."""
    world = World(records=5, partitions=2)
    stream = Stream(world, "r1", owns=range(2), pace=RetryPace(10.0, 10.0))
    stream.turn()
    stream.end(Outcome.FAILED)
    world.kafka.produce(tp(0), 1)
    assert stream.turn(1.0) is None, "no delay is over"
    again = stream.turn(10.0) or stream.turn()
    assert again is not None
    assert again.ranges == (span(0, 0, 5),)
    assert world.kafka.claims(0) == [(5, "s.r1.2.2")]
    assert world.kafka.claims(1) == [(5, "s.r1.1.1")], "not begun, so not written"
    said = "orders-1: [0, 5): next, after the current batch (attempt 2)"
    assert said in summary(stream.engine, world.now)
    stream.end()
    rest = [stream.end().ranges for _ in range(6) if stream.turn()]
    assert sorted(rest) == [(span(0, 5, 6),), (span(1, 0, 5),)], "with new records in turn"
    assert (world.kafka.offset(0), world.kafka.offset(1)) == (6, 5)


def test_new_records_of_other_partitions_go_on_while_a_range_waits() -> None:
    """A delay takes no room from the others."""
    world = World(records=5)
    world.kafka.produce(tp(1), 0)
    stream = Stream(world, "r1", owns=range(2), pace=RetryPace(60.0, 60.0))
    stream.turn()
    stream.end(Outcome.FAILED)
    world.kafka.produce(tp(1), 3)
    begun = stream.turn(1.0) or stream.turn(1.0)
    assert begun is not None
    assert begun.ranges == (span(1, 0, 3),)


def test_after_all_attempts_the_partition_is_stopped_and_its_next_owner_knows() -> None:
    """A bad record costs its attempts once, and not once for each owner."""
    world = World(records=5)
    first = Stream(world, "r1", owns=[0])
    for _ in range(3):
        assert first.turn() or first.turn()
        first.end(Outcome.FAILED)
    assert first.engine.partitions[tp(0)].phase is Phase.STOPPED
    second = Stream(world, "r2")
    move(world, first, second, 0)
    second.turn()
    owned = second.engine.partitions[tp(0)]
    assert owned.phase is Phase.STOPPED
    assert "3 attempts on orders-0 [0, 5) failed, the last one in streaming run r1" in (
        owned.stop_reason
    )
    assert world.notes[("s.r1.3.3", span(0, 0, 5))] is Outcome.FAILED


def test_the_claim_of_a_dead_run_is_done_again_as_the_next_attempt() -> None:
    """A record that kills each process that reads it must not be tried for ever."""
    world = World(records=5, partitions=2)
    first = Stream(world, "r1", owns=range(2))
    first.turn()
    second = Stream(world, "r2")
    lose(first, second, 0, 1)
    assert second.turn() is None, "the first run may be at work"
    first.die()
    begun = second.turn(2.0) or second.turn()
    assert begun is not None
    assert begun.ranges == (span(0, 0, 5),), "from the second attempt on each range is alone"
    assert world.kafka.claims(0) == [(5, "s.r2.1.2")]
    assert world.kafka.claims(1) == [(5, "s.r1.1.1")], "begun once, and not by the second run"
    second.end()
    second.turn()
    assert second.turn() is not None or second.work.at_work is not None
    second.end()
    assert (world.kafka.offset(0), world.kafka.offset(1)) == (5, 5)


def test_ranges_that_only_shared_a_batch_with_a_killer_are_not_counted_with_it() -> None:
    """Only what was begun counts: else good ranges would be stopped, or skipped."""
    world = World(records=5, partitions=3)
    streams = []
    for name in ("r1", "r2", "r3", "r4"):
        stream = Stream(world, name)
        streams.append(stream)
        if len(streams) == 1:
            stream.feed(events.PartitionsAssigned(tuple(tp(number) for number in range(3))))
        else:
            lose(streams[-2], stream, 0, 1, 2)
        stream.turn()
        stream.turn()
        if stream.work.at_work is not None and span(0, 0, 5) in stream.work.at_work.ranges:
            stream.die()
            continue
        break
    last = streams[-1]
    for _ in range(6):
        if last.work.at_work is not None:
            last.end()
        last.turn()
    assert last.engine.partitions[tp(0)].phase is Phase.STOPPED
    assert (world.kafka.offset(1), world.kafka.offset(2)) == (5, 5)


def test_a_revoke_waits_for_the_batch_at_work_and_the_rest_goes_on() -> None:
    """Nobody else gets a partition while its records are worked on."""
    world = World(records=5, partitions=2)
    first = Stream(world, "r1", owns=range(2))
    first.turn()
    first.feed(events.RevokeRequested((tp(1),)))
    assert first.turn() is None
    assert first.engine.held == {tp(1)}
    world.kafka.produce(tp(0), 1)
    first.end()
    assert first.engine.held == frozenset()
    assert (world.kafka.offset(0), world.kafka.offset(1)) == (5, 5)
    begun = first.turn(1.0) or first.turn(1.0)
    assert begun is not None
    assert begun.ranges == (span(0, 5, 6),)


def test_a_batch_that_outlives_its_hold_is_interrupted_and_its_next_owner_is_told() -> None:
    """Its ranges come back under the same bounds, and it was no attempt."""
    world = World(records=5)
    first = Stream(world, "r1", owns=[0], settings=EngineSettings(budget=HoldBudget(10.0, 2.0)))
    second = Stream(world, "r2")
    first.turn()
    first.feed(events.RevokeRequested((tp(0),)))
    world.wait(8.5, first)
    assert first.interrupts > 0
    world.wait(2.0, first)
    second.feed(events.PartitionsAssigned((tp(0),)))
    assert second.turn() is None
    assert world.notes == {}, "it is still at work"
    first.end(Outcome.INTERRUPTED)
    assert world.notes == {("s.r1.1.1", span(0, 0, 5)): Outcome.INTERRUPTED}
    begun = second.turn(2.0) or second.turn()
    assert begun is not None
    assert begun.ranges == (span(0, 0, 5),)
    assert world.kafka.claims(0) == [(5, "s.r2.1000000001.1")]


def test_an_interrupted_range_comes_again_alone_and_five_in_a_row_stop_its_partition() -> None:
    """A body that never returns was interrupted by each deploy, and counted as nothing."""
    world = World(records=5, partitions=2)
    stream = Stream(world, "r1", owns=range(2))
    stream.turn()
    stream.end(Outcome.INTERRUPTED)
    begun = stream.turn()
    assert begun is not None
    assert begun.ranges == (span(0, 0, 5),)
    for _ in range(12):
        if stream.work.at_work is not None:
            is_bad = span(0, 0, 5) in stream.work.at_work.ranges
            stream.end(Outcome.INTERRUPTED if is_bad else Outcome.SUCCEEDED)
        stream.turn()
    assert world.kafka.offset(1) == 5, "the healthy range goes on"
    owned = stream.engine.partitions[tp(0)]
    assert owned.phase is Phase.STOPPED
    assert "in a row on orders-0 [0, 5) were interrupted" in owned.stop_reason
    while stream.work.at_work is None:
        stream.turn()
    stream.end()
    assert owned.partition in stream.engine.partitions
    assert stream.engine.partitions[tp(0)].phase is Phase.OWNED
    assert world.kafka.offset(0) == 5


def test_the_interruptions_of_a_range_count_across_its_owners() -> None:
    """Each deploy brings a new run."""
    world = World(records=5)
    streams = [Stream(world, "r0", owns=[0])]
    streams[0].turn()
    for number in range(1, 6):
        assert streams[-1].work.at_work is not None
        streams.append(Stream(world, f"r{number}"))
        lose(streams[-2], streams[-1], 0)
        streams[-2].end(Outcome.INTERRUPTED)
        streams[-1].turn(2.0)
        streams[-1].turn()
    assert streams[-1].engine.partitions[tp(0)].phase is Phase.STOPPED
    assert "the last one by streaming run r4" in streams[-1].engine.partitions[tp(0)].stop_reason


def test_a_range_with_five_interruptions_waits_for_its_delay_unless_the_code_is_new() -> None:
    """A range that kills the JVM of each run ended run after run, with all their partitions."""
    world = World(records=5)
    Stream(world, "r0").die()
    batch = StreamBatch("r0", 7, interruptions=4)
    world.kafka.stored[tp(0)] = encode(StoredPartition(0, (Claim(5, str(batch)),)))
    world.notes[str(batch), span(0, 0, 5)] = Outcome.INTERRUPTED
    pace = RetryPace(60.0, 60.0)
    same = Stream(world, "r1", owns=[0], pace=pace)
    assert same.turn(2.0) is None
    assert same.turn(10.0) is None
    newer = Stream(world, "r2", settings=EngineSettings(code_version="v2"), pace=pace)
    lose(same, newer, 0)
    assert newer.turn(2.0) or newer.turn()


def test_a_failed_attempt_begins_the_count_of_interruptions_again() -> None:
    """The body came to an end."""
    world = World(records=5)
    stream = Stream(world, "r1", owns=[0])
    for outcome in (Outcome.INTERRUPTED, Outcome.INTERRUPTED, Outcome.FAILED):
        assert stream.turn() or stream.turn()
        stream.end(outcome)
    assert stream.turn() or stream.turn()
    assert world.kafka.claims(0) == [(5, "s.r1.4.2")]


def test_a_batch_that_a_person_stopped_is_no_interruption() -> None:
    """Its ranges come again together, and at once."""
    work = Worker("r1")
    work.begin([BatchRequest("s.r1.1.1", 1, (span(0, 0, 5),))], {"s.r1.1.1"}, lambda _: Log())
    work.stop()
    work.interrupt(1.0)
    ended = work.end(Outcome.INTERRUPTED)
    assert ended is not None
    assert ended.outcome is Outcome.DROPPED


def test_a_stopped_range_is_tried_at_once_by_the_run_of_a_deploy() -> None:
    """It waited for its delay twice, and the new run was blamed for the failures of the old one."""
    world = World(records=5)
    pace = RetryPace(60.0, 60.0)
    first = Stream(world, "r1", owns=[0])
    for _ in range(3):
        assert first.turn() or first.turn()
        first.end(Outcome.FAILED)
    second = Stream(world, "r2", pace=pace)
    move(world, first, second, 0)
    second.turn()
    begun = second.work.at_work or second.turn()
    assert begun is not None
    assert begun.ranges == (span(0, 0, 5),)
    owned = second.engine.partitions[tp(0)]
    assert owned.phase is Phase.STOPPED, "until it has succeeded"
    assert "3 attempts on orders-0 [0, 5) failed, the last one in streaming run r1" in (
        owned.stop_reason
    )
    shown = [text for _, text in second.shown]
    assert shown == [owned.stop_reason], "it is shown once"
    onlooker = Stream(world, "r3", owns=[0])
    onlooker.pass_time()
    assert "the last one in streaming run r1" in onlooker.engine.partitions[tp(0)].stop_reason
    second.end(Outcome.FAILED)
    assert "4 attempts on orders-0 [0, 5) failed, the last one in streaming run r2" in (
        second.engine.partitions[tp(0)].stop_reason
    )
    assert second.turn(30.0) is None, "its own failure has its delay"


def test_a_range_whose_process_died_waits_unless_the_code_is_new() -> None:
    """A record that kills its process must not kill run after run without a pause."""
    world = World(records=5)
    pace = RetryPace(60.0, 60.0)
    first = Stream(world, "r1", owns=[0])
    first.turn()
    first.die()
    same, newer = (
        Stream(world, name, settings=EngineSettings(code_version=version), pace=pace)
        for name, version in (("r2", ""), ("r3", "v2"))
    )
    lose(first, same, 0)
    assert same.turn(2.0) is None
    assert same.turn(10.0) is None
    lose(same, newer, 0)
    assert newer.turn(2.0) or newer.turn()


def test_a_partition_that_is_taken_in_again_keeps_the_delays_of_its_ranges() -> None:
    """An election of a leader is no reason to wait again, or to try at once."""
    world = World(records=5)
    stream = Stream(world, "r1", owns=[0], pace=RetryPace(60.0, 60.0))
    stream.turn()
    stream.end(Outcome.FAILED)
    stream.turn(30.0)
    (before,) = stream.engine.partitions[tp(0)].entries
    world.kafka.elect(0)
    stream.turn(2.0)
    stream.turn(2.0)
    (after,) = stream.engine.partitions[tp(0)].entries
    assert stream.engine.partitions[tp(0)].phase is Phase.OWNED
    assert (after.due_at, after.claimed_at) == (before.due_at, None)


def test_a_leave_whose_batch_was_interrupted_for_a_revoke_did_not_drain() -> None:
    """The receipt said that it drained, after the deadline of another hold."""
    world = World(records=5)
    stream = Stream(world, "r1", owns=[0], settings=EngineSettings(budget=HoldBudget(30.0, 5.0)))
    stream.turn()
    stream.feed(events.LeaveRequested("a signal", 60.0))
    stream.end(Outcome.INTERRUPTED)
    world.wait(1.0, stream)
    (receipt,) = stream.receipts
    assert receipt.outcome is ReceiptOutcome.DEADLINE
    assert receipt.handed_over == (tp(0),)


def test_a_success_that_came_too_late_for_its_own_commit_is_committed_by_the_next_owner() -> None:
    """Nothing is done twice."""
    world = World(records=5)
    first, second = Stream(world, "r1", owns=[0]), Stream(world, "r2")
    first.turn()
    lose(first, second, 0)
    assert first.interrupts == 1
    first.end(Outcome.SUCCEEDED)
    for _ in range(4):
        assert second.turn(1.0) is None
    assert world.kafka.offset(0) == 5
    assert world.output == {span(0, 0, 5): 1}


def test_a_claim_of_another_run_that_lives_takes_no_room_from_the_own_batches() -> None:
    """Everything else keeps full speed."""
    world = World(records=5, partitions=2)
    first, second = Stream(world, "r1", owns=[0]), Stream(world, "r2", owns=[])
    first.turn()
    lose(first, second, 0)
    second.feed(events.PartitionsAssigned((tp(1),)))
    begun = second.turn() or second.turn()
    assert begun is not None
    assert begun.ranges == (span(1, 0, 5),)


def test_a_frozen_run_is_ended_before_its_claim_is_done_again() -> None:
    """Its sign of life does not change any more."""
    world = World(records=5)
    first, second = Stream(world, "r1", owns=[0]), Stream(world, "r2")
    first.turn()
    lose(first, second, 0)
    for _ in range(50):
        assert second.turn(1.0) is None
    for _ in range(40):
        second.turn(1.0)
    dead = second.given(commands.EndDeadRuns)
    assert dead
    assert isinstance(dead[0], commands.EndDeadRuns)
    assert dict(dead[0].signs) == {"r1": "1"}


def test_a_frozen_run_is_ended_also_while_the_own_batches_go_on() -> None:
    """What the worker tells of its own batch says nothing about other runs."""
    world = World(records=5, partitions=2)
    first, second = Stream(world, "r1", owns=[0]), Stream(world, "r2")
    first.turn()
    lose(first, second, 0)
    second.feed(events.PartitionsAssigned((tp(1),)))
    for _ in range(80):
        world.kafka.produce(tp(1), 1)
        if second.turn(1.0):
            second.end()
    assert second.given(commands.EndDeadRuns)


def test_a_run_that_looked_at_the_claim_before_it_was_taken_is_waited_for() -> None:
    """A person executes a run of the batch again in the very moment in which it is taken over."""
    world = World(records=5)
    sensor = world.member(owns=1)
    (failed,) = sensor.tick(state=RunState.STARTED)
    batch = world.dagster.runs[failed]
    world.dagster.move(failed, RunState.CANCELED, is_taken_back=True)
    stream = Stream(world, "r1")
    sensor.feed(events.PartitionsLost((tp(0),)))
    stream.fails.add(commands.WriteOffsets)
    stream.feed(events.PartitionsAssigned((tp(0),)))
    again = world.dagster.add(batch.batch_id, batch.ranges)
    assert world.start(again) is None, "the claim stands"
    stream.fails.clear()
    for _ in range(8):
        assert stream.turn(1.0) is None
    assert world.kafka.claims(0) == [(5, "s.r1.1.1")]
    world.succeed(again)
    world.done_by_streams.add(("s.r1.1.1", span(0, 0, 5)))  # by that run
    for _ in range(4):
        assert stream.turn(1.0) is None
    assert world.kafka.offset(0) == 5


def test_a_run_that_is_deleted_while_its_range_is_committed_ends_no_member() -> None:
    """Its range was taken over, and the commit is not the ledger's any more if its entry changes.

    What the run has done stays done.
    """
    world = World(records=5)
    sensor = world.member(owns=1)
    (failed,) = sensor.tick(state=RunState.STARTED)
    batch = world.dagster.runs[failed]
    world.dagster.move(failed, RunState.CANCELED, is_taken_back=True)
    stream = Stream(world, "r1")
    sensor.feed(events.PartitionsLost((tp(0),)))
    stream.fails.add(commands.WriteOffsets)
    stream.feed(events.PartitionsAssigned((tp(0),)))
    again = world.dagster.add(batch.batch_id, batch.ranges)
    stream.fails.clear()
    for _ in range(4):
        assert stream.turn(1.0) is None
    assert world.kafka.claims(0) == [(5, "s.r1.1.1")]
    world.succeed(again)
    world.done_by_streams.add(("s.r1.1.1", span(0, 0, 5)))  # by that run
    stream.fails.add(commands.WriteOffsets)
    for _ in range(8):
        assert stream.turn(1.0) is None
    assert stream.engine.partitions[tp(0)].committing is not None
    del world.dagster.runs[again]
    for _ in range(8):
        assert stream.turn(1.0) is None
    assert world.kafka.offset(0) == 0, "the commit has not reached Kafka"
    stream.fails.clear()
    for _ in range(8):
        assert stream.turn(1.0) is None
    assert world.kafka.offset(0) == 5


def test_a_run_that_looks_at_the_claim_after_it_was_taken_refuses_itself() -> None:
    """The other order of the same two steps."""
    world = World(records=5)
    sensor = world.member(owns=1)
    (failed,) = sensor.tick(state=RunState.STARTED)
    batch = world.dagster.runs[failed]
    world.dagster.move(failed, RunState.CANCELED, is_taken_back=True)
    stream = Stream(world, "r1")
    lose(sensor, stream, 0)
    assert stream.turn() or stream.turn()
    again = world.dagster.add(batch.batch_id, batch.ranges)
    assert "is not claimed by batch" in str(world.start(again))


def test_a_sensor_may_have_requested_a_run_for_a_batch_of_the_worker() -> None:
    """A partition that comes back: its claim names the worker, and somebody else works on it."""
    world = World(records=5)
    stream = Stream(world, "r1", owns=[0])
    stream.turn()
    sensor = world.member()
    lose(stream, sensor, 0)
    stream.end(Outcome.INTERRUPTED)
    world.wait(2.0, sensor)
    (run_id,) = sensor.tick()
    assert world.dagster.runs[run_id].batch_id == "s.r1.1.1"
    assert world.start(run_id) is None
    lose(sensor, stream, 0)
    for _ in range(8):
        assert stream.turn(1.0) is None, "that run works"
    world.succeed(run_id)
    for _ in range(4):
        assert stream.turn(1.0) is None
    assert world.kafka.offset(0) == 5


def test_a_streaming_run_takes_over_the_batches_of_a_sensor() -> None:
    """A group moves from a run for each batch to streaming runs with claims in flight."""
    world = World(records=5, partitions=3)
    limits = BatchLimits(max_ranges_per_run=1)
    sensor = world.member(owns=3, settings=EngineSettings(limits=limits))
    (working, *others) = sensor.tick(state=RunState.STARTED)
    stream = Stream(world, "r1")
    lose(sensor, stream, 0, 1, 2)
    for run_id in others:
        world.dagster.move(run_id, RunState.CANCELED, is_taken_back=True)
    world.dagster.move(working, RunState.STARTED, heartbeat="1")
    working_on = world.dagster.runs[working].ranges
    done: list[OffsetRange] = []
    for _ in range(6):
        begun = stream.turn(1.0)
        if begun is not None:
            done.extend(stream.end().ranges)
    assert done
    assert not set(done) & set(working_on), "another run works on them"
    world.succeed(working)
    for _ in range(3):
        stream.turn(1.0)
    assert [world.kafka.offset(number) for number in range(3)] == [5, 5, 5]


def test_a_run_that_dagster_created_and_nobody_submits_is_cancelled_and_its_batch_taken() -> None:
    """The sensor that could submit it is off."""
    world = World(records=5)
    sensor = world.member(owns=1)
    (run_id,) = sensor.tick(state=RunState.CREATED)
    world.dagster.move(run_id, RunState.CREATED, attempt=1)
    stream = Stream(world, "r1")
    lose(sensor, stream, 0)
    stream.turn()
    cancels = [
        c.run_ids for c in stream.given(commands.CancelRuns) if isinstance(c, commands.CancelRuns)
    ]
    assert cancels == [(run_id,)]
    world.dagster.move(run_id, RunState.CANCELED, is_taken_back=True)
    assert (stream.turn(1.0) or stream.turn(1.0)) is not None


def test_a_sensor_takes_over_the_batches_of_a_streaming_run() -> None:
    """A group moves back; the attempt of a dead run counts."""
    world = World(records=5, partitions=1)
    stream = Stream(world, "r1", owns=[0])
    stream.turn()
    sensor = world.member()
    lose(stream, sensor, 0)
    assert sensor.tick() == []
    stream.die()
    world.wait(2.0, sensor)
    (run_id,) = sensor.tick()
    assert world.dagster.runs[run_id].batch_id == "s.r1.1.1"
    assert world.start(run_id) is None
    world.succeed(run_id)
    world.wait(2.0, sensor)
    assert world.kafka.offset(0) == 5


def test_a_claim_of_very_many_attempts_costs_a_thousand_of_them_and_is_worked_on() -> None:
    """A range that is stopped for months has them, and whoever may commit can write them."""
    world = World(records=5)
    Stream(world, "r0").die()
    world.kafka.stored[tp(0)] = encode(StoredPartition(0, (Claim(5, "s.r0.7.4000"),)))
    stream = Stream(world, "r1", owns=range(1), pace=RetryPace(1.0, 5.0))
    seen_as = stream.stream_runs(["s.r0.7.4000"], [("s.r0.7.4000", span(0, 0, 5))])
    assert len(seen_as) == 1001
    for outcome in (Outcome.FAILED, Outcome.FAILED, Outcome.SUCCEEDED):
        while stream.turn(1.0) is None:
            assert world.now < 2_000
        stream.end(outcome)
    stream.turn()
    assert world.kafka.offset(0) == 5


def test_a_streaming_run_needs_no_ticks() -> None:
    """Dagster's daemon may be away for hours."""
    world = World()
    stream = Stream(world, "r1", owns=[0])
    world.wait(7200.0, stream, step=10.0)
    world.kafka.produce(tp(0), 3)
    assert stream.turn(1.0) or stream.turn()


def test_end_offsets_are_read_seldom_while_nothing_is_there_to_be_read() -> None:
    """An idle run costs next to nothing; one with work hears of records at once."""
    world = World(records=5)
    settings = EngineSettings(look_s=0.1, idle_look_s=0.5)
    stream = Stream(world, "r1", owns=[0], settings=settings)

    def looks(seconds: float) -> int:
        before = len(stream.given(commands.ReadBounds))
        world.wait(seconds, stream, step=0.1)
        return len(stream.given(commands.ReadBounds)) - before

    stream.turn()
    assert looks(2.0) >= 18, "a batch is at work"
    stream.end()
    looks(3.0)
    assert looks(5.0) <= 10
    world.kafka.produce(tp(0), 1)
    looks(1.0)
    assert looks(2.0) >= 18


def test_a_leave_waits_for_the_batch_at_work() -> None:
    """A deploy, or a run that is cancelled in Dagster: the batch is not wasted."""
    world = World(records=5, partitions=2)
    stream = Stream(world, "r1", owns=range(2))
    stream.turn()
    stream.feed(events.LeaveRequested("asked to", 30.0))
    assert stream.turn(1.0) is None
    assert stream.left is None
    stream.end()
    stream.turn()
    assert stream.left == "asked to"
    assert world.notes == {}
    assert (world.kafka.offset(0), world.kafka.offset(1)) == (5, 5)


def test_a_batch_whose_claims_are_written_in_part_is_not_begun() -> None:
    """Its id would stand for two different works."""
    world = World(records=5, partitions=2)
    first, second = Stream(world, "r1", owns=range(2)), Stream(world, "r2")
    first.turn()
    lose(first, second, 0, 1)
    first.end(Outcome.INTERRUPTED)
    second.fails.add(commands.WriteOffsets)
    assert second.turn(2.0) is None
    assert second.turn(0.1) is None
    second.fails.clear()
    begun = second.turn(2.0)
    assert begun is not None
    assert begun.ranges == (span(0, 0, 5),), "an interrupted range comes again alone"


def test_an_id_that_was_told_to_others_is_never_begun_again() -> None:
    """They would believe the old word, and begin as well."""
    world = World(records=5)
    first, second = Stream(world, "r1", owns=[0]), Stream(world, "r2")
    first.turn()
    first.feed(events.PartitionsLost((tp(0),)))
    first.end(Outcome.INTERRUPTED)
    first.feed(events.PartitionsAssigned((tp(0),)))
    assert first.turn(1.0) or first.turn(1.0)
    assert world.kafka.claims(0) == [(5, "s.r1.1000000002.1")]
    lose(first, second, 0)
    for _ in range(6):
        assert second.turn(1.0) is None, "the first run works on it"


def test_a_run_remembers_what_it_has_told_of_a_partition_that_comes_back() -> None:
    """A bad record costs its attempts once, and a success is not done again."""
    world = World(records=5)
    stream = Stream(world, "r1", owns=[0])
    attempts = 0
    while stream.engine.partitions[tp(0)].phase is not Phase.STOPPED and attempts < 10:
        assert stream.turn(1.0) or stream.turn(1.0) or stream.turn(1.0)
        stream.end(Outcome.FAILED)
        attempts += 1
        stream.feed(events.PartitionsLost((tp(0),)))
        stream.turn()
        stream.feed(events.PartitionsAssigned((tp(0),)))
        stream.pass_time()
    assert attempts == 3

    world = World(records=5)
    stream = Stream(world, "r1", owns=[0])
    stream.turn()
    stream.feed(events.PartitionsLost((tp(0),)))
    stream.end(Outcome.SUCCEEDED)
    stream.turn()
    stream.feed(events.PartitionsAssigned((tp(0),)))
    assert stream.turn(1.0) is None
    assert world.kafka.offset(0) == 5


def test_a_partition_whose_claim_is_refused_keeps_no_other_back() -> None:
    """A right is missing on one of two topics."""
    world = World(records=5, partitions=2)
    stream = Stream(world, "r1", owns=range(2))
    refused = stream._written

    def written(writes: tuple[commands.OffsetWrite, ...]) -> events.Event | None:
        bad = tuple(write for write in writes if write.partition == tp(1) and write.new.metadata)
        answer = refused(tuple(write for write in writes if write not in bad))
        assert isinstance(answer, events.OffsetsWritten)
        return replace(answer, refused=tuple((write, "no right") for write in bad))

    stream._written = written  # type: ignore[method-assign]
    for _ in range(20):
        world.kafka.produce(tp(0), 1)
        if stream.turn(1.0):
            stream.end()
    assert (world.kafka.offset(0) or 0) > 15
    assert stream.engine.partitions[tp(1)].phase is Phase.STOPPED


@pytest.mark.parametrize("has_left", [True, False])
def test_a_claim_that_cannot_be_taken_over_keeps_no_other_partition_back(*, has_left: bool) -> None:
    """Kafka refuses to store the name of the run that is to work on it next.

    The claim is one of a run that has left, or an attempt on it has failed.
    """
    world = World(records=0, partitions=3)
    for number in range(1 if has_left else 3):
        world.kafka.produce(tp(number), 5)
    stream = Stream(world, "r1", owns=range(3))
    assert stream.turn() is not None
    if has_left:
        world.streams["r1"] = replace(world.streams["r1"], state=RunState.SUCCEEDED)
        stream = Stream(world, "r2")
    stored = stream._written

    def written(writes: tuple[commands.OffsetWrite, ...]) -> events.Event | None:
        bad = tuple(write for write in writes if write.partition == tp(0))
        answer = stored(tuple(write for write in writes if write not in bad))
        assert isinstance(answer, events.OffsetsWritten)
        return replace(answer, refused=tuple((write, "no right") for write in bad))

    stream._written = written  # type: ignore[method-assign]
    if has_left:
        stream.feed(events.PartitionsAssigned(tuple(map(tp, range(3)))))
        for _ in range(5):
            assert stream.turn(1.0) is None
        for number in (1, 2):
            world.kafka.produce(tp(number), 5)
    else:
        stream.end(Outcome.FAILED)
    for _ in range(20):
        if stream.turn(1.0):
            stream.end()
    assert [world.kafka.offset(number) for number in (1, 2)] == [5, 5]
    assert stream.engine.partitions[tp(0)].phase is Phase.STOPPED
    (said,) = [line for line in summary(stream.engine, world.now) if "no right" in line]
    assert "when the batch at work has ended" not in said


def test_many_bad_ranges_do_not_keep_new_records_back() -> None:
    """They take turns, however long the bad ones take."""
    world = World(records=5, partitions=5)
    stream = Stream(world, "r1", owns=range(5), pace=RetryPace(1.0, 5.0))
    done = 0
    for _ in range(120):
        world.kafka.produce(tp(4), 1)
        if stream.turn(1.0):
            assert stream.work.at_work is not None
            is_bad = any(range_.partition < 4 for range_ in stream.work.at_work.ranges)
            world.now += 3.0
            stream.end(Outcome.FAILED if is_bad else Outcome.SUCCEEDED)
            done += not is_bad
    assert done > 20


def test_a_success_under_the_old_id_outlives_the_run_that_took_the_claim() -> None:
    """The claim names the batch that it was taken from until its runs were looked up."""
    world = World(records=5)
    sensor = world.member(owns=1)
    (run_id,) = sensor.tick(state=RunState.STARTED)
    world.dagster.move(run_id, RunState.STARTED, heartbeat="1")
    first, second = Stream(world, "r1"), Stream(world, "r2")
    sensor.feed(events.PartitionsLost((tp(0),)))
    world.kafka.stored[tp(0)] = encode(
        StoredPartition(0, (Claim(5, "s.r1.1.1", world.dagster.runs[run_id].batch_id),))
    )
    world.succeed(run_id)
    first.die()
    world.done_by_streams.add(("s.r1.1.1", span(0, 0, 5)))  # by that run
    second.feed(events.PartitionsAssigned((tp(0),)))
    for _ in range(4):
        assert second.turn(1.0) is None
    assert world.kafka.offset(0) == 5


def test_a_claim_waits_for_the_write_before_it() -> None:
    """One write of a partition at a time; the first one notes which log the offsets belong to."""
    world = World(records=5)
    first, second = Stream(world, "r1", owns=[0]), Stream(world, "r2")
    first.turn()
    first.feed(events.PartitionsLost((tp(0),)))
    first.end(Outcome.INTERRUPTED)
    world.kafka.topic_id = "made-later"
    second.unanswered.add(commands.WriteOffsets)
    second.feed(events.PartitionsAssigned((tp(0),)))
    assert second.turn(0.1) is None
    assert world.kafka.claims(0) == [(5, "s.r1.1.1")]
    second.unanswered.clear()
    assert second.turn(2.0) or second.turn()
    assert world.kafka.claims(0) == [(5, "s.r2.1000000001.1")]


@pytest.mark.parametrize(
    ("run", "outcome", "state"),
    [
        (RunState.STARTED, None, RunState.STARTED),
        (RunState.FAILED, None, RunState.FAILED),
        (RunState.SUCCEEDED, None, RunState.CANCELED),
        (RunState.CANCELED, None, RunState.CANCELED),
        (RunState.STARTED, Outcome.SUCCEEDED, RunState.SUCCEEDED),
        (RunState.FAILED, Outcome.INTERRUPTED, RunState.CANCELED),
        (RunState.STARTED, Outcome.FAILED, RunState.FAILED),
    ],
)
def test_what_a_streaming_run_and_its_note_mean_for_a_batch(
    run: RunState, outcome: Outcome | None, state: RunState
) -> None:
    """The note is the word of the run itself; without one its end decides."""
    world = World()
    stream = Stream(world, "r1")
    seen_as = replace(world.streams[stream.run_id], state=run)
    *before, now = StreamBatch("r1", 7, 3).seen((span(0, 0, 5),), seen_as, outcome)
    assert (now.state, now.attempt, now.ranges) == (state, 3, (span(0, 0, 5),))
    assert [(one.state, one.attempt) for one in before] == [
        (RunState.FAILED, 1),
        (RunState.FAILED, 2),
    ]


def test_a_run_that_says_that_it_works_elsewhere_has_dropped_its_batch() -> None:
    """It may not know of the claim: somebody erased it while it owned the partition."""
    world = World()
    stream = Stream(world, "r1")
    for named, state in ((frozenset({tp(0)}), RunState.STARTED), (frozenset(), RunState.CANCELED)):
        said = replace(world.streams[stream.run_id], may_work_on=named)
        (now,) = StreamBatch("r1", 7).seen((span(0, 0, 5),), said, None)
        assert now.state is state


@pytest.mark.parametrize("text", ["", "b-1", "s.r1.1", "s.r1.1.1.0", "s.r 1.1.1", "s.r1.x.1"])
def test_other_ids_are_no_batches_of_a_streaming_run(text: str) -> None:
    """Ids of a run for each batch are random."""
    assert StreamBatch.read(text) is None
    assert StreamBatch.read("s.r1.12.3") == StreamBatch("r1", 12, 3)


def test_an_id_with_interruptions_has_the_form_that_earlier_versions_read() -> None:
    """In a deploy, a member that takes the id for a foreign one does the work of the run again."""
    batch = StreamBatch("r1", 12, 3, 4)
    assert str(batch) == "s.r1.4000000012.3"
    assert StreamBatch.read(str(batch)) == batch


def test_a_batch_with_more_interruptions_than_its_id_can_have_is_begun() -> None:
    """Its claim was written again and again, since the id never had the count of the range."""
    batch = StreamBatch("r1", 12, 3, 5_000)
    assert str(batch) == "s.r1.999000000012.3"
    batch_request = BatchRequest(str(batch), 3, (span(0, 0, 5),), interruptions=5_000, is_own=True)
    assert is_claimed_by(batch_request, "r1")


def test_a_run_that_ended_itself_has_interrupted_its_batch() -> None:
    """Its body ignored the interruption, and the process was ended with it."""
    world = World()
    stream = Stream(world, "r1")
    ended = replace(world.streams[stream.run_id], state=RunState.FAILED, is_taken_back=True)
    (now,) = StreamBatch("r1", 7).seen((span(0, 0, 5),), ended, None)
    assert (now.is_interrupted, now.is_taken_back, now.has_died) == (True, False, False)
    *before, now = StreamBatch("r1", 7, 2, 2).seen((span(0, 0, 5),), ended, Outcome.SUCCEEDED)
    assert [(one.state, one.is_interrupted) for one in before] == [
        (RunState.FAILED, False),
        (RunState.CANCELED, True),
        (RunState.CANCELED, True),
    ]
