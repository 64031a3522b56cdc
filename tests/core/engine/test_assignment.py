"""A member takes partitions over from an earlier owner.

It finds what the earlier owner claimed, requested and committed, adopts it and finishes it.
"""

from __future__ import annotations

from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.batches.settings import EngineSettings
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.events import Found, LastRecorded
from dagster_rebalance.core.model.offsets import Bounds, OffsetAndMetadata
from dagster_rebalance.core.model.run import RunState
from dagster_rebalance.core.partitions.state_machine import Phase
from tests.core.world import Member, World, span, tp


def notes(member: Member) -> list[str]:
    """All notes so far."""
    return [command.text for command in member.done if isinstance(command, commands.Note)]


def crashed(world: World, *, partitions: int = 1, runs: int = 1) -> tuple[Member, list[str]]:
    """A member that claimed a batch in one run over its partitions, requested it, and went away."""
    settings = EngineSettings(limits=BatchLimits(max_runs_in_flight=runs))
    member = world.member(owns=partitions, settings=settings)
    return member, member.tick(state=RunState.STARTED)


def test_what_was_found_with_the_offset_is_claimed_at_once() -> None:
    """A partition that changes hands stands still for as long as its new owner takes."""
    world = World(records=100)
    member = world.member()
    member.fails.add(commands.ReadBounds)
    member.feed(events.PartitionsAssigned((tp(0),)))
    assert world.kafka.claims(0) == [(100, "b1")]


def test_a_member_has_settled_when_it_has_claimed_what_is_ready() -> None:
    """The first tick waits for that: it has runs to request then, or there is nothing to do."""
    world = World(records=100)
    member = world.member()
    assert not member.engine.has_settled, "nothing is assigned"
    member.fails.add(commands.ReadStoredOffsets)
    member.feed(events.PartitionsAssigned((tp(0),)))
    assert not member.engine.has_settled, "it is not taken in"
    member.fails = {commands.WriteOffsets}
    world.wait(2, member)
    assert not member.engine.has_settled, "its claim is not confirmed"
    member.fails = set()
    world.wait(2, member)
    assert member.engine.has_settled
    assert member.engine.batch_requests


def test_a_live_run_is_adopted_and_committed_by_the_new_owner() -> None:
    """No second run is asked for."""
    world = World(records=100)
    _, (run_id,) = crashed(world)
    heir = world.member(owns=1)
    assert "adopted run1, which works on orders-0 [0, 100)" in notes(heir)
    assert heir.engine.batch_requests == ()
    world.succeed(run_id)
    world.wait(1, heir)
    assert world.kafka.commits == [(tp(0), 100)]
    (record,) = world.dagster.recorded
    assert (record.run_id, record.claim_to_commit_s, record.is_late) == (run_id, None, False)


def test_a_run_that_succeeded_meanwhile_is_committed_at_once() -> None:
    """Within the call that takes the partition in."""
    world = World(records=100)
    _, (run_id,) = crashed(world)
    world.succeed(run_id)
    world.member(owns=1)
    assert world.kafka.commits == [(tp(0), 100)]


def test_a_claim_without_a_run_is_requested_with_the_same_batch_id_and_bounds() -> None:
    """Its owner crashed between the claim and the tick."""
    world = World(records=100)
    world.member(owns=1)
    world.kafka.produce(tp(0), 50)
    heir = world.member(owns=1)
    (batch_request,) = heir.engine.batch_requests
    assert (batch_request.batch_id, batch_request.attempt, batch_request.ranges) == (
        "b1",
        1,
        (span(0, 0, 100),),
    )


def test_a_claim_whose_run_failed_is_requested_as_the_next_attempt() -> None:
    """Under a new run key, so that Dagster does not ignore it."""
    world = World(records=100)
    old, (run_id,) = crashed(world)
    world.dagster.move(run_id, RunState.FAILED)
    heir = world.member(owns=1)
    (batch_request,) = heir.engine.batch_requests
    assert (batch_request.batch_id, batch_request.attempt, batch_request.ranges) == (
        "b1",
        2,
        (span(0, 0, 100),),
    )
    assert batch_request.run_key not in {known.run_key for known in old.engine.batch_requests}


def test_both_owners_of_a_batch_adopt_its_run_for_their_own_range() -> None:
    """After a rebalance a batch may have two owners; one run serves both."""
    world = World(records=100, partitions=2)
    crashed_member, (run_id,) = crashed(world, partitions=2)
    blue, green = world.member(), world.member()
    blue.feed(events.PartitionsAssigned((tp(0),)))
    green.feed(events.PartitionsAssigned((tp(1),)))
    assert blue.engine.batch_requests == green.engine.batch_requests == ()
    world.succeed(run_id)
    world.wait(1, blue, green)
    assert sorted(world.kafka.commits) == [(tp(0), 100), (tp(1), 100)]
    assert crashed_member.engine.partitions.keys() == {tp(0), tp(1)}


def test_both_owners_of_a_failed_batch_request_their_own_part_of_it() -> None:
    """Same batch id, run keys of their own; the runs do not share a range, so both may work."""
    world = World(records=100, partitions=2)
    _, (run_id,) = crashed(world, partitions=2)
    world.dagster.move(run_id, RunState.FAILED)
    blue, green = world.member(), world.member()
    blue.feed(events.PartitionsAssigned((tp(0),)))
    green.feed(events.PartitionsAssigned((tp(1),)))
    (first,), (second,) = blue.tick(), green.tick()
    assert world.start(first) is None
    assert world.start(second) is None
    world.succeed(first)
    world.dagster.move(second, RunState.FAILED)
    world.wait(1, blue, green)
    assert world.kafka.commits == [(tp(0), 100)]
    assert [batch_request.attempt for batch_request in green.engine.batch_requests] == [3]


def test_a_commit_that_was_never_recorded_is_recorded_once_by_the_next_owner() -> None:
    """Its owner crashed between the commit and the materialisation."""
    world = World(records=100)
    member, (run_id,) = crashed(world)
    member.fails.add(commands.RecordCommit)
    world.succeed(run_id)
    world.wait(1, member)
    assert (world.kafka.offset(0), world.dagster.recorded) == (100, [])
    heir = world.member(owns=1)
    (record,) = world.dagster.recorded
    assert (record.range, record.run_id, record.is_late) == (span(0, 0, 100), run_id, True)
    world.wait(5, heir)
    world.member(owns=1)
    assert len(world.dagster.recorded) == 1


def test_an_offset_that_an_operator_moved_is_obeyed_and_said() -> None:
    """It is the operator's decision."""
    world = World(records=100)
    member, (run_id,) = crashed(world)
    world.succeed(run_id)
    world.wait(1, member)
    world.kafka.stored[tp(0)] = OffsetAndMetadata(40)
    heir = world.member(owns=1)
    said = (
        "orders-0 continues at offset 40, which was set by somebody else: "
        "the last recorded commit ended at 100"
    )
    assert said in notes(heir)
    assert world.kafka.claims(0) == [(100, "b2")]


def test_late_answers_of_an_earlier_epoch_are_ignored() -> None:
    """The partition was lost and came back: another owner may have written in between."""
    world = World(records=100)
    member = world.member()
    member.unanswered |= {commands.WriteOffsets}
    member.feed(events.PartitionsAssigned((tp(0),)))
    first = member.engine.partitions[tp(0)]
    assert first.pending is not None
    late_write = events.OffsetsWritten((first.pending.write,))
    late_read = events.StoredOffsetsRead(
        {tp(0): first.epoch, tp(9): 1},
        {tp(0): Found(OffsetAndMetadata(77), Bounds(0, 100), LastRecorded(77))},
    )
    late_record = events.CommitRecorded(
        commands.RecordCommit(span(0, 0, 77), first.epoch, "b", "r", 0, None, None)
    )
    member.feed(events.PartitionsLost((tp(0),)))
    for event in (late_write, late_read, late_record, events.BoundsRead({tp(0): Bounds(0, 1)})):
        member.feed(event)
    assert member.engine.partitions == {}
    member.fails.add(commands.ReadStoredOffsets)
    member.feed(events.PartitionsAssigned((tp(0),)))
    again = member.engine.partitions[tp(0)]
    assert again.epoch > first.epoch
    for event in (late_write, late_read, late_record, events.BoundsRead({tp(0): Bounds(0, 1)})):
        member.feed(event)
    assert member.engine.partitions[tp(0)] == again
    assert member.engine.partitions[tp(0)].phase is Phase.RESTORING


def test_an_answer_that_was_asked_for_twice_is_taken_once() -> None:
    """The second one may be older than what was written since."""
    world = World(records=100)
    member = world.member(owns=1)
    owned = member.engine.partitions[tp(0)]
    member.feed(events.StoredOffsetsRead({tp(0): owned.epoch}, {tp(0): Found(None, Bounds(0, 5))}))
    assert member.engine.partitions[tp(0)] == owned


def test_runs_are_known_before_a_partition_is_owned() -> None:
    """The answer must cover the partition's claims and the live runs of the group."""
    world = World(records=100)
    _, (run_id,) = crashed(world)
    heir = world.member()
    heir.fails.add(commands.ReadRuns)
    heir.feed(events.PartitionsAssigned((tp(0),)))
    run = world.dagster.runs[run_id]
    heir.feed(events.RunsRead(frozenset({"b1"}), (run,)))
    assert heir.engine.partitions[tp(0)].phase is Phase.RESTORING
    heir.feed(events.RunsRead(frozenset(), (run,), with_live=True))
    assert heir.engine.partitions[tp(0)].phase is Phase.RESTORING
    heir.feed(events.RunsRead(frozenset({"b1"}), (run,), with_live=True))
    assert heir.engine.partitions[tp(0)].phase is Phase.OWNED


def test_reads_that_are_not_answered_are_asked_for_again() -> None:
    """The broker or the database was away at the assignment."""
    world = World(records=100)
    member = world.member()
    member.fails |= {commands.ReadStoredOffsets, commands.ReadRuns, commands.ReadBounds}
    member.feed(events.PartitionsAssigned((tp(0),)))
    world.wait(3, member)
    assert 3 <= len(member.given(commands.ReadStoredOffsets)) <= 4
    member.fails.clear()
    member.tick()
    world.wait(2, member)
    assert world.kafka.claims(0) == [(100, "b1")]


def test_two_runs_that_refused_each_other_are_followed_by_a_third() -> None:
    """Two requesters of one batch: no output is safe, then the owner asks again."""
    world = World(records=100)
    zombie = world.member(owns=1)
    (batch_request,) = zombie.engine.batch_requests
    heir = world.member(owns=1)
    first = world.dagster.add(batch_request.batch_id, batch_request.ranges)
    (second,) = heir.tick(state=RunState.STARTED)
    assert world.check(first) is not None
    assert world.check(second) is None
    world.dagster.move(second, RunState.FAILED, is_refused=True)
    world.wait(1, heir)
    (third,) = heir.tick()
    assert world.start(third) is None
    world.succeed(third)
    world.wait(1, heir)
    assert world.kafka.commits == [(tp(0), 100)]


def test_a_partition_that_is_not_read_yet_does_not_disturb_the_others() -> None:
    """Its offsets could not be read; the runs of the others are looked up all the same."""
    world = World(records=100, partitions=2)
    member = world.member(owns=1)
    (run_id,) = member.tick(state=RunState.STARTED)
    member.fails.add(commands.ReadStoredOffsets)
    member.feed(events.PartitionsAssigned((tp(1),)))
    world.succeed(run_id)
    world.wait(1, member)
    assert world.kafka.commits == [(tp(0), 100)]
    assert member.engine.partitions[tp(1)].ledger is None


def test_an_answer_to_a_write_that_is_not_under_way_changes_nothing() -> None:
    """The write was tried twice, and both answers came."""
    world = World(records=100)
    member = world.member(owns=1)
    (run_id,) = member.tick(state=RunState.STARTED)
    world.succeed(run_id)
    member.unanswered.add(commands.WriteOffsets)
    world.wait(1, member)
    pending = member.engine.partitions[tp(0)].pending
    assert pending is not None
    member.feed(events.OffsetsWritten((pending.write,)))
    once = member.engine.partitions[tp(0)]
    member.feed(
        events.OffsetsWritten((pending.write,), ((pending.write, events.WriteFailure.CHANGED),))
    )
    assert member.engine.partitions[tp(0)] == once
    assert len(world.dagster.recorded) == 1
