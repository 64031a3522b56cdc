"""The life of a batch: plan, claim, request, run, commit, record.

It also covers what happens when a step fails.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.batches.settings import EngineSettings, ForeignMetadata
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.offsets import Bounds, OffsetAndMetadata
from dagster_rebalance.core.model.run import RunState
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.reporting.explain import summary
from dagster_rebalance.core.runs.retry import RetryPace
from tests.core.world import Member, World, span, tp

TWO_CLAIMS = EngineSettings(
    limits=BatchLimits(max_records_per_range=10, max_claims_per_partition=2)
)


def test_a_batch_is_claimed_before_it_is_offered_and_committed_before_it_is_recorded() -> None:
    """The order that makes a crash at any point harmless."""
    world = World(records=100)
    member = world.member()
    member.fails.add(commands.WriteOffsets)
    member.feed(events.PartitionsAssigned((tp(0),)))
    assert member.engine.batch_requests == ()
    member.fails.clear()
    world.wait(1.25, member)
    assert world.kafka.claims(0) == [(100, "b1")]
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    world.wait(1, member)
    world.succeed(run_id)
    world.wait(1, member)
    assert world.kafka.offset(0) == 100
    assert [
        (r.range, r.run_id, r.batch_id, r.lag, r.is_late, r.drain_s) for r in world.dagster.recorded
    ] == [(span(0, 0, 100), run_id, "b1", 0, False, None)]
    kinds = [
        type(command)
        for command in member.done
        if isinstance(command, commands.WriteOffsets | commands.RecordCommit)
    ]
    assert kinds[-2:] == [commands.WriteOffsets, commands.RecordCommit]
    assert member.engine.partitions[tp(0)].entries == ()


def test_the_claims_are_looked_up_again_when_a_run_refuses_itself() -> None:
    """Whoever moves the offset of a partition erases its claims.

    Without a second look, runs would be asked for and would refuse themselves for ever. Found by
    simulation.
    """
    world = World(records=100)
    member = world.member(owns=1)
    world.kafka.stored[tp(0)] = OffsetAndMetadata(40)
    (run_id,) = member.tick()
    assert world.start(run_id) is not None
    world.wait(3, member)
    assert world.kafka.claims(0) == [(100, "b2")]
    assert [batch_request.ranges for batch_request in member.engine.batch_requests] == [
        (span(0, 40, 100),)
    ]


def test_the_claims_of_a_stopped_partition_are_looked_up_again_when_a_run_refuses_itself() -> None:
    """A person may re-execute a run after the offset of its stopped partition was moved.

    Without a second look at the claims, that run would refuse itself for ever. Found by simulation.
    """
    world = World(records=100)
    member = world.member(owns=1, settings=EngineSettings(max_attempts=1))
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    world.dagster.move(run_id, RunState.FAILED)
    world.wait(2, member)
    assert member.engine.partitions[tp(0)].phase is Phase.STOPPED
    world.kafka.stored[tp(0)] = OffsetAndMetadata(40)
    again = world.dagster.add("b1", (span(0, 0, 100),), RunState.WAITING)
    world.dagster.move(again, RunState.WAITING, parent_id="r1")
    assert world.start(again) is not None
    world.wait(11, member)
    assert member.engine.partitions[tp(0)].phase is Phase.OWNED
    assert [batch_request.ranges for batch_request in member.engine.batch_requests] == [
        (span(0, 40, 100),)
    ]


def test_a_range_waits_no_longer_for_the_refusals_of_another_one() -> None:
    """The looks at two ranges whose runs refused themselves take turns: their waits differ.

    A claim must not be doubted again for a run that was seen before: the look at the claims begins
    the waits anew, so no run would ever be asked for. Found by simulation.
    """
    settings = replace(TWO_CLAIMS, recheck_s=5.0)
    world = World(records=20)
    member = world.member(owns=1, settings=settings, pace=RetryPace(0.5, 10.0))
    world.wait(1, member)
    for batch_id, range_, times in (("b1", span(0, 0, 10), 5), ("b2", span(0, 10, 20), 1)):
        for _ in range(times):
            run_id = world.dagster.add(batch_id, (range_,))
            world.dagster.move(run_id, RunState.FAILED, is_refused=True)
    world.wait(30, member)
    (batch_request,) = member.engine.batch_requests
    assert batch_request.ranges == (span(0, 0, 10),)


def test_a_claim_that_still_stands_is_kept_when_a_run_refuses_itself() -> None:
    """The run may have refused itself for another run of its batch.

    The look costs one request, and happens once.
    """
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick()
    world.dagster.move(run_id, RunState.FAILED, is_refused=True)
    world.wait(10, member)
    assert world.kafka.claims(0) == [(100, "b1")]
    assert [batch_request.attempt for batch_request in member.engine.batch_requests] == [2]
    assert len(member.given(commands.ReadStoredOffsets)) == 2


def test_a_batch_is_offered_under_the_same_key_until_its_run_exists() -> None:
    """A tick that times out or is previewed throws its requests away."""
    world = World(records=100)
    member = world.member(owns=1)
    offered = member.engine.batch_requests
    for _ in range(5):
        member.feed(events.TickArrived())
        world.wait(5, member)
        assert member.engine.batch_requests == offered
    member.tick()
    assert member.tick() == []
    world.wait(1, member)
    assert member.engine.batch_requests == ()


def test_a_run_that_fails_twice_and_then_succeeds_is_committed_once() -> None:
    """The same batch id and bounds each time, under a new key."""
    world = World(records=100)
    member = world.member(owns=1)
    for _ in range(2):
        (run_id,) = member.tick()
        assert world.start(run_id) is None
        world.dagster.move(run_id, RunState.FAILED)
        world.wait(1, member)
        assert world.kafka.claims(0) == [(100, "b1")]
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    world.succeed(run_id)
    world.wait(1, member)
    assert world.kafka.commits == [(tp(0), 100)]
    assert [run.batch_id for run in world.dagster.runs.values()] == ["b1"] * 3


def test_a_partition_is_stopped_after_too_many_failures_and_goes_on_when_a_person_mended_it() -> (
    None
):
    """It says which run to re-execute; the others keep working."""
    world = World(records=100, partitions=2)
    limits = BatchLimits(max_ranges_per_run=1)
    member = world.member(owns=2, settings=EngineSettings(limits=limits))
    run_id, _ = member.tick(state=RunState.STARTED)
    (failing,) = world.dagster.runs[run_id].ranges
    for _ in range(2):
        world.dagster.move(run_id, RunState.FAILED)
        world.wait(1, member)
        (run_id,) = member.tick(state=RunState.STARTED)
    world.dagster.move(run_id, RunState.FAILED)
    world.wait(1, member)
    stopped = member.engine.partitions[failing.topic_partition]
    assert stopped.phase is Phase.STOPPED
    assert stopped.stop_reason == (
        f"{failing.topic_partition}: 3 runs failed on {failing}, the last one is {run_id}. "
        "Fix the cause, then re-execute that run in Dagster, or `dagster-rebalance retry "
        f"orders:{failing.partition}`: when it succeeds, the partition goes on"
    )
    assert stopped.last_failure == (run_id, stopped.entries[0].batch_id, "")
    assert {owned.last_failure for owned in member.engine.partitions.values()} == {
        stopped.last_failure,
        None,
    }
    assert member.shown == [(failing.topic_partition, stopped.stop_reason)]
    assert member.engine.batch_requests == ()
    again = world.dagster.add("b1", (failing,))
    world.dagster.move(again, RunState.STARTED, parent_id="r1")
    assert world.check(again) is None
    world.wait(11, member)
    assert member.shown[-1] != (failing.topic_partition, ""), "it may fail again"
    world.succeed(again)
    world.wait(1, member)
    assert member.shown[-1] == (failing.topic_partition, "")
    assert (failing.topic_partition, 100) in world.kafka.commits
    assert member.engine.partitions[failing.topic_partition].phase is Phase.OWNED


def test_the_runs_of_a_stopped_partition_are_read_seldom() -> None:
    """A thousand partitions may stop at once.

    Without the delay, all their runs would be read each second, for nothing.
    """
    world = World(records=10)
    pace = RetryPace(first_s=3600.0, limit_s=3600.0)
    member = world.member(owns=1, settings=replace(EngineSettings(), max_attempts=1, pace=pace))
    (run_id,) = member.tick(state=RunState.STARTED)
    world.dagster.move(run_id, RunState.FAILED)
    world.wait(2, member)
    assert member.engine.partitions[tp(0)].phase is Phase.STOPPED
    before = len(member.given(commands.ReadRuns))
    _turns(world, member, 60)
    assert 5 <= len(member.given(commands.ReadRuns)) - before <= 7
    again = world.dagster.add("b1", (span(0, 0, 10),))
    world.dagster.move(again, RunState.STARTED, parent_id=run_id)
    _turns(world, member, 11)
    before = len(member.given(commands.ReadRuns))
    _turns(world, member, 5)
    assert len(member.given(commands.ReadRuns)) - before == 5, "what is at work is followed"


def test_partitions_that_are_taken_in_again_keep_their_room() -> None:
    """Each restart of a broker would else double the runs at work."""
    world = World(records=0, partitions=4)
    limits = BatchLimits(max_ranges_per_run=1, max_runs_in_flight=2)
    member = world.member(owns=4, settings=EngineSettings(limits=limits))
    for number in (0, 1):
        world.kafka.produce(tp(number), 100)
    world.wait(2, member)
    assert len(member.tick(state=RunState.STARTED)) == 2
    for number in (2, 3):
        world.kafka.produce(tp(number), 100)
    world.wait(3, member)
    for number in (0, 1):
        world.kafka.elect(number)
    member.fails.add(commands.ReadStoredOffsets)
    world.wait(2, member)
    member.tick(state=RunState.STARTED)
    member.fails.clear()
    world.wait(3, member)
    assert sum(run.is_live for run in world.dagster.runs.values()) == 2


def test_runs_are_looked_up_sooner_while_more_waits_to_be_claimed() -> None:
    """A partition stands still between the end of its run and the look that finds it."""
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick(state=RunState.STARTED)
    before = len(member.given(commands.ReadRuns))
    _turns(world, member, 10)
    assert len(member.given(commands.ReadRuns)) - before == 10
    world.kafka.produce(tp(0), 100)
    _turns(world, member, 1)
    world.succeed(run_id)
    before = len(member.given(commands.WriteOffsets))
    world.wait(0.5, member)
    assert len(member.given(commands.WriteOffsets)) - before == 2, (
        "it is committed, and the next range is claimed"
    )


def test_a_stopped_partition_takes_no_room_from_the_others() -> None:
    """Else a few stopped partitions would stall the whole member in silence."""
    world = World(records=20)
    settings = replace(
        TWO_CLAIMS, max_attempts=1, limits=replace(TWO_CLAIMS.limits, max_runs_in_flight=1)
    )
    member = world.member(owns=1, settings=settings)
    (run_id,) = member.tick(state=RunState.STARTED)
    other = replace(settings, limits=replace(settings.limits, max_runs_in_flight=2))
    member.engine.settings = other
    world.wait(2, member)
    assert world.kafka.claims(0) == [(10, "b1"), (20, "b2")]
    member.engine.settings = settings
    world.dagster.move(run_id, RunState.FAILED)
    world.wait(2, member)
    assert member.engine.partitions[tp(0)].phase is Phase.STOPPED
    world.kafka.produce(tp(1), 5)
    member.tick()
    member.feed(events.PartitionsAssigned((tp(1),)))
    world.wait(1, member)
    assert world.kafka.claims(1) == [(5, "b3")]


def test_dagsters_own_retry_is_waited_for() -> None:
    """Else two runs would work on the range."""
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick(state=RunState.STARTED)
    world.dagster.move(run_id, RunState.FAILED, awaits_retry=True)
    world.wait(5, member)
    assert member.engine.batch_requests == ()
    retry = world.dagster.add("b1", (span(0, 0, 100),))
    world.dagster.move(run_id, RunState.FAILED, awaits_retry=False)
    world.dagster.move(retry, RunState.STARTED, parent_id="r1")
    assert world.check(retry) is None
    world.succeed(retry)
    world.wait(1, member)
    assert world.kafka.offset(0) == 100


def test_two_batches_of_one_partition_that_finish_out_of_order_are_committed_in_order() -> None:
    """The second one waits for the first, and both are recorded."""
    world = World(records=25)
    member = world.member(owns=1, settings=TWO_CLAIMS)
    world.wait(1, member)
    first, second = member.tick()
    for run_id in (first, second):
        assert world.start(run_id) is None
    world.succeed(second)
    world.wait(2, member)
    assert world.kafka.offset(0) == 0
    world.succeed(first)
    world.wait(1, member)
    assert world.kafka.commits == [(tp(0), 10), (tp(0), 20)]
    assert [record.range for record in world.dagster.recorded] == [span(0, 0, 10), span(0, 10, 20)]


def test_a_commit_whose_answer_was_lost_is_tried_again_and_counts_once() -> None:
    """It is the same write: what is stored already is the new value."""
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick(state=RunState.STARTED)
    world.succeed(run_id)
    member.unanswered.add(commands.WriteOffsets)
    world.wait(1, member)
    assert world.kafka.offset(0) == 100
    assert world.dagster.recorded == []
    writes = world.kafka.writes
    member.unanswered.clear()
    world.wait(1, member)
    assert world.kafka.writes == writes
    assert [record.range for record in world.dagster.recorded] == [span(0, 0, 100)]


def test_a_write_that_failed_for_now_is_tried_again_only_after_a_while() -> None:
    """A broker that is away is not flooded."""
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick(state=RunState.STARTED)
    world.succeed(run_id)
    member.fails.add(commands.WriteOffsets)
    world.wait(1, member)
    write = member.engine.partitions[tp(0)].pending
    assert write is not None
    before = len(member.given(commands.WriteOffsets))
    member.feed(events.OffsetsWritten((), ((write.write, events.WriteFailure.RETRIABLE),)))
    assert len(member.given(commands.WriteOffsets)) == before
    world.wait(1.25, member)
    assert len(member.given(commands.WriteOffsets)) == before + 1


def test_the_next_commit_waits_until_the_last_one_is_recorded() -> None:
    """The metadata names one commit only.

    A second commit would erase the first one before it is recorded, and a crash would lose that
    record.
    """
    world = World(records=20)
    member = world.member(owns=1, settings=TWO_CLAIMS)
    world.wait(1, member)
    for run_id in member.tick(state=RunState.STARTED):
        world.succeed(run_id)
    member.fails.add(commands.RecordCommit)
    world.wait(3, member)
    assert world.kafka.commits == [(tp(0), 10)]
    assert 2 <= len(member.given(commands.RecordCommit)) <= 4
    member.fails.clear()
    world.wait(2, member)
    assert world.kafka.commits == [(tp(0), 10), (tp(0), 20)]
    assert len(world.dagster.recorded) == 2


def test_a_stored_value_that_somebody_changed_is_taken_in_again_and_not_overwritten() -> None:
    """Read before write: an operator moved the offset while a run was working."""
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    world.kafka.stored[tp(0)] = OffsetAndMetadata(50)
    world.succeed(run_id)
    world.wait(2, member)
    assert world.kafka.offset(0) == 50
    assert world.kafka.commits == []
    assert world.kafka.claims(0) == [(100, "b2")]
    notes = [note.text for note in member.given(commands.Note) if isinstance(note, commands.Note)]
    assert (
        "the stored offset of orders-0 is not what this member wrote: it is looked up again"
        in notes
    )


def test_a_run_at_work_without_a_claim_is_waited_for_before_anything_starts() -> None:
    """The operator's reset erased its claim, but it writes to the same output."""
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    world.kafka.produce(tp(0), 20)
    world.kafka.stored[tp(0)] = OffsetAndMetadata(50)
    member.feed(events.PartitionsLost((tp(0),)))
    member.feed(events.PartitionsAssigned((tp(0),)))
    world.wait(5, member)
    owned = member.engine.partitions[tp(0)]
    assert (owned.phase, owned.blocked_by) == (Phase.RESTORING, (run_id,))
    assert world.kafka.claims(0) == []
    world.succeed(run_id)
    member.tick()
    world.wait(2, member)
    assert world.kafka.claims(0) == [(120, "b2")]
    assert member.engine.partitions[tp(0)].blocked_by == ()


def test_a_dead_run_is_ended_and_its_batch_asked_for_again() -> None:
    """Dagster shows it as started for ever; its process is gone."""
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    for _ in range(58):
        member.tick()
        world.wait(1, member)
    assert member.given(commands.EndDeadRuns) == []
    for _ in range(8):
        member.tick()
        world.wait(1, member)
    assert member.given(commands.EndDeadRuns) == [commands.EndDeadRuns({run_id: "begun"})]
    assert world.dagster.runs["run2"].ranges == (span(0, 0, 100),)


def _turns(world: World, member: Member, seconds: int) -> None:
    for _ in range(seconds):
        member.tick()
        world.wait(1, member)


def test_a_dead_run_that_cannot_be_ended_stops_its_partition_until_it_can() -> None:
    """A pod on a lost node stays listed, say: nobody may begin, and somebody has to know."""
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    member.fails.add(commands.EndDeadRuns)
    _turns(world, member, 650)
    assert not member.given(commands.ShowStop)
    _turns(world, member, 30)
    why = member.engine.partitions[tp(0)].stop_reason
    assert why.startswith(f"orders-0: run {run_id} gives no sign of life, and could not be ended")
    member.fails.clear()
    _turns(world, member, 40)
    assert member.given(commands.ShowStop) == [
        commands.ShowStop(tp(0), why),
        commands.ShowStop(tp(0), ""),
    ]
    assert world.dagster.runs["run2"].ranges == (span(0, 0, 100),)


def test_a_partition_that_waits_for_such_a_run_before_it_is_taken_in_is_stopped_too() -> None:
    """The run may work on more than it has claimed there: it had been given all of them."""
    world = World(records=100)
    run_id = world.dagster.add("x", (span(0, 0, 100),))
    world.dagster.move(run_id, RunState.STARTED, heartbeat="begun")
    member = world.member()
    member.fails.add(commands.EndDeadRuns)
    member.feed(events.PartitionsAssigned((tp(0),)))
    _turns(world, member, 650)
    assert not member.given(commands.ShowStop)
    _turns(world, member, 30)
    assert member.engine.partitions[tp(0)].phase is Phase.RESTORING
    why = member.engine.partitions[tp(0)].stop_reason
    assert why.startswith(f"orders-0: run {run_id} gives no sign of life, and could not be ended")
    member.fails.clear()
    _turns(world, member, 40)
    assert member.given(commands.ShowStop) == [
        commands.ShowStop(tp(0), why),
        commands.ShowStop(tp(0), ""),
    ]
    assert world.kafka.claims(0) == [(100, "b1")]


def test_a_run_that_ended_in_dagster_only_has_no_company() -> None:
    """The work of a run may go on, in Spark for example, after Dagster shows its end.

    Its code server saw a process end and marked the run, or a person forced its end.
    """
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    world.wait(1, member)
    world.dagster.move(run_id, RunState.FAILED, is_over=False)
    _turns(world, member, 50)
    assert list(world.dagster.runs) == [run_id]
    assert member.given(commands.EndDeadRuns) == []
    assert any(
        "run run1 has ended in Dagster, and its process may still be running" in line
        for line in summary(member.engine, world.now)
    )
    _turns(world, member, 15)
    assert member.given(commands.EndDeadRuns) == [commands.EndDeadRuns({run_id: "begun"})]
    assert list(world.dagster.runs) == [run_id, "run2"]


def test_a_run_that_says_itself_that_it_is_finished_is_tried_again_at_once() -> None:
    """An ordinary failure must not wait a minute.

    The Spark work of the run is still stopped before anything else begins.
    """
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    world.wait(1, member)
    world.dagster.move(run_id, RunState.FAILED, is_gone=True, is_over=False)
    _turns(world, member, 4)
    assert member.given(commands.EndDeadRuns) == [commands.EndDeadRuns({run_id: "begun"})]
    assert list(world.dagster.runs) == [run_id, "run2"]


def test_the_next_owner_does_not_begin_before_a_run_is_over_either() -> None:
    """What its former owner knew of the run is not known to it."""
    world = World(records=100)
    first = world.member(owns=1)
    (run_id,) = first.tick()
    assert world.start(run_id) is None
    world.wait(1, first)
    first.feed(events.PartitionsLost((tp(0),)))
    world.dagster.move(run_id, RunState.CANCELED, is_over=False)
    second = world.member(owns=1)
    _turns(world, second, 50)
    assert list(world.dagster.runs) == [run_id]
    _turns(world, second, 15)
    assert second.given(commands.EndDeadRuns) == [commands.EndDeadRuns({run_id: "begun"})]
    assert list(world.dagster.runs) == [run_id, "run2"]


def test_a_run_that_is_deleted_while_it_works_has_no_company() -> None:
    """Deleting a run in the UI ends no process.

    The process stops itself when it finds that its run is gone.
    """
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    world.wait(1, member)
    del world.dagster.runs[run_id]
    world.dagster.keys.clear()  # Dagster finds the run of a key by looking among its runs
    _turns(world, member, 50)
    assert not world.dagster.runs
    _turns(world, member, 15)
    assert member.given(commands.EndDeadRuns) == [commands.EndDeadRuns({run_id: "begun"})]
    assert list(world.dagster.runs) == ["run2"]


def test_a_run_that_is_deleted_while_its_partition_changes_hands_has_no_company() -> None:
    """The next owner never saw it in Dagster: it finds the note of its work."""
    world = World(records=100)
    first = world.member(owns=1)
    (run_id,) = first.tick()
    assert world.start(run_id) is None
    world.wait(1, first)
    world.dagster.move(run_id, RunState.DELETED, is_over=False)
    world.dagster.keys.clear()
    second = world.member(owns=1)
    second.tick()
    _turns(world, second, 50)
    assert list(world.dagster.runs) == [run_id]
    assert any(
        "run run1 was deleted from Dagster, and its process may still be running" in line
        for line in summary(second.engine, world.now)
    )
    _turns(world, second, 15)
    assert list(world.dagster.runs) == ["run2"]


def test_a_deleted_run_whose_process_is_known_to_be_gone_keeps_nobody_waiting() -> None:
    """Its Spark work is stopped, and that is all there is to wait for."""
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    world.wait(1, member)
    world.dagster.move(run_id, RunState.DELETED, is_over=False, is_gone=True)
    world.dagster.keys.clear()
    _turns(world, member, 4)
    assert member.given(commands.EndDeadRuns) == [commands.EndDeadRuns({run_id: "begun"})]
    assert list(world.dagster.runs) == ["run2"]
    assert member.engine.pulse.unconfirmed == {}


def test_a_silent_run_on_partitions_of_others_is_theirs_to_end() -> None:
    """A member ends only the silent runs that block its own partitions.

    While it waits for a run before it takes a partition in, it reads all live runs of the group.
    """
    world = World(records=100, partitions=2)
    blocking = world.dagster.add("x", (span(0, 0, 100),))
    foreign = world.dagster.add("y", (span(1, 0, 100),))
    for run_id in (blocking, foreign):
        world.dagster.move(run_id, RunState.STARTED, heartbeat="begun")
    member = world.member(owns=1)
    _turns(world, member, 65)
    assert member.given(commands.EndDeadRuns) == [commands.EndDeadRuns({blocking: "begun"})]


def test_the_first_batch_of_a_partition_waits_for_no_more_records() -> None:
    """Nobody knows for how long they have waited; what comes behind them waits for company."""
    world = World(records=5)
    limits = BatchLimits(min_records=100, max_wait_s=30)
    member = world.member(owns=1, settings=EngineSettings(limits=limits))
    (run_id,) = member.tick()
    world.start(run_id)
    world.succeed(run_id)
    world.wait(2, member)
    world.kafka.produce(tp(0), 10)
    world.wait(20, member)
    assert member.tick() == []
    world.wait(15, member)
    (second,) = member.tick()
    assert world.dagster.runs[second].ranges == (span(0, 5, 15),)


def test_records_for_which_a_batch_has_no_room_do_not_wait_all_over_again() -> None:
    """They would wait a max_wait_s for each batch before them, and nobody said so."""
    world = World(records=5)
    limits = BatchLimits(max_records_per_batch=10, min_records=100, max_wait_s=30)
    member = world.member(owns=1, settings=EngineSettings(limits=limits))
    world.succeed(_started(world, member))
    world.wait(2, member)
    world.kafka.produce(tp(0), 25)
    world.wait(35, member)
    for start, until in ((5, 15), (15, 25), (25, 30)):
        run_id = _started(world, member)
        assert world.dagster.runs[run_id].ranges == (span(0, start, until),)
        world.succeed(run_id)
        world.wait(3, member)
    world.kafka.produce(tp(0), 1)
    world.wait(20, member)
    assert member.tick() == [], "what comes after all were read waits for company"


def _started(world: World, member: Member) -> str:
    (run_id,) = member.tick()
    world.start(run_id)
    return run_id


def test_a_partition_waits_for_a_run_without_a_claim_until_it_is_over() -> None:
    """A person moved the offset while the run worked, and then forced its end."""
    world = World(records=100)
    run_id = world.dagster.add("x", (span(0, 0, 100),))
    world.dagster.move(run_id, RunState.STARTED, heartbeat="begun")
    member = world.member(owns=1)
    _turns(world, member, 5)
    world.dagster.move(run_id, RunState.CANCELED, is_over=False)
    _turns(world, member, 40)
    assert member.engine.partitions[tp(0)].blocked_by == (run_id,)
    world.dagster.move(run_id, RunState.CANCELED, is_over=True)
    _turns(world, member, 3)
    assert world.kafka.claims(0) == [(100, "b1")]


def test_nothing_is_claimed_without_recent_ticks() -> None:
    """Nobody would start the run; the sensor is off or the daemon is away."""
    world = World()
    member = world.member(owns=1)
    world.wait(16, member)
    world.kafka.produce(tp(0), 10)
    world.wait(5, member)
    assert world.kafka.claims(0) == []
    member.tick()
    world.wait(2, member)
    assert world.kafka.claims(0) == [(10, "b1")]


def test_a_batch_of_which_a_claim_is_not_written_yet_is_not_requested() -> None:
    """A claim that was written only in part is completed first."""
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
    assert [batch_request.ranges for batch_request in member.engine.batch_requests] == [
        (span(0, 0, 10), span(1, 0, 10))
    ]


def test_a_group_without_a_commit_writes_its_first_position_at_once() -> None:
    """Else `latest` would move on with every rebalance, and skip what came in between."""
    world = World()
    world.member(owns=1)
    assert world.kafka.stored == {tp(0): OffsetAndMetadata(0)}


def test_foreign_metadata_stops_a_partition_until_it_is_gone() -> None:
    """It is looked at again, says its reason once, and nothing is written."""
    world = World(records=100)
    world.kafka.stored[tp(0)] = OffsetAndMetadata(50, "host-7")
    member = world.member(owns=1)
    assert member.engine.partitions[tp(0)].phase is Phase.STOPPED
    world.wait(30, member)
    ((partition, reason),) = member.shown
    assert (partition, "'host-7' was not written by dagster_rebalance" in reason) == (tp(0), True)
    assert world.kafka.stored[tp(0)] == OffsetAndMetadata(50, "host-7")
    world.kafka.stored[tp(0)] = OffsetAndMetadata(50)
    member.tick()
    world.wait(11, member)
    assert member.shown[1:] == [(tp(0), "")]
    assert world.kafka.claims(0) == [(100, "b1")]


def test_foreign_metadata_is_overwritten_when_the_settings_say_so() -> None:
    """For a group that is taken over from another application."""
    world = World(records=100)
    world.kafka.stored[tp(0)] = OffsetAndMetadata(50, "host-7")
    world.member(owns=1, settings=EngineSettings(foreign_metadata=ForeignMetadata.OVERWRITE))
    assert world.kafka.claims(0) == [(100, "b1")]


def test_a_partition_whose_next_offset_was_deleted_is_stopped() -> None:
    """Retention ran past it: to go on would skip records without a word."""
    world = World(records=0)
    member = world.member(owns=1)
    world.kafka.bounds[tp(0)] = Bounds(30, 60)
    world.wait(1.25, member)
    assert "Kafka's retention deleted records from offset 0 on" in member.shown[0][1]
    world.kafka.bounds[tp(0)] = Bounds(40, 60)
    world.wait(21, member)
    assert len(member.shown) == 1, "retention goes on, and the reason is the same"
    assert world.kafka.offset(0) == 0
    world.kafka.stored[tp(0)] = OffsetAndMetadata(40)
    member.tick()
    world.wait(11, member)
    assert member.shown[1:] == [(tp(0), "")]
    assert world.kafka.claims(0) == [(60, "b1")]


def test_a_range_that_failed_and_was_deleted_since_is_passed_at_a_person_s_word() -> None:
    """No run can read it again; the person has moved the offset, and the member sees it."""
    world = World(records=10)
    member = world.member(owns=1, settings=EngineSettings(max_attempts=1))
    (run_id,) = member.tick()
    world.dagster.move(run_id, RunState.FAILED, has_started=True, is_over=True)
    world.wait(2.0, member)
    assert "failed" in member.shown[-1][1]
    world.kafka.bounds[tp(0)] = Bounds(30, 60)
    world.wait(11, member)
    assert "Kafka's retention deleted records from offset 0 on" in member.shown[-1][1]
    world.kafka.stored[tp(0)] = OffsetAndMetadata(30)
    member.tick()
    world.wait(11, member)
    assert member.shown[-1] == (tp(0), "")
    assert world.kafka.claims(0) == [(60, "b2")]


def test_an_illegal_event_raises() -> None:
    """Two owners of a partition in one member would be a bug of the shell."""
    world = World(partitions=2)
    member = world.member(owns=1)
    before = dict(member.engine.partitions)
    with pytest.raises(IllegalStateError, match="orders-0 was assigned twice"):
        member.feed(events.PartitionsAssigned((tp(1), tp(0))))
    assert member.engine.partitions == before


def test_a_partition_that_passes_what_was_deleted_is_shown_to_go_on() -> None:
    """Its runs had read the records in time; another member has shown it as stopped meanwhile."""
    world = World(records=20)
    member = world.member(owns=1, settings=TWO_CLAIMS)
    world.wait(2.0, member)
    first, second = member.tick()
    world.start(first)
    world.start(second)
    world.kafka.bounds[tp(0)] = Bounds(17, 20)
    world.wait(2.0, member)
    world.succeed(first)
    world.wait(2.0, member)
    assert world.kafka.offset(0) == 10
    assert member.shown == []
    world.succeed(second)
    world.wait(2.0, member)
    assert world.kafka.offset(0) == 20
    assert member.shown == [(tp(0), "")]


def test_a_partition_that_is_moved_past_what_was_deleted_is_shown_to_go_on() -> None:
    """A person has acted on what another member had shown; the owner has never stopped it."""
    world = World(records=10)
    member = world.member(owns=1)
    (run_id,) = member.tick()
    world.start(run_id)
    world.kafka.bounds[tp(0)] = Bounds(7, 10)
    world.wait(2.0, member)
    world.kafka.stored[tp(0)] = OffsetAndMetadata(7)
    world.succeed(run_id)
    world.wait(2.0, member)
    assert member.shown == [(tp(0), "")]
    assert world.kafka.claims(0) == [(10, "b2")]


def test_a_partition_cannot_be_claimed_before_its_offset_is_known() -> None:
    """A claim behind an unknown offset could say anything."""
    why = "orders-0 cannot be claimed before its committed offset is known"
    with pytest.raises(IllegalStateError, match=why):
        OwnedPartition(tp(0), 1).claim_write("b", 10, now=0.0)
    with pytest.raises(IllegalStateError, match=why):
        OwnedPartition(tp(0), 1).claim_again_write(span(0, 0, 10), "b", now=0.0)


def test_lag_is_zero_while_nothing_is_known() -> None:
    """A number that nobody knows is not shown."""
    assert OwnedPartition(tp(0), 1).lag == 0
