"""Assignment: a member restores partitions, adopts runs and finishes the work of earlier owners."""

from __future__ import annotations

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.events import LastRecorded, PartitionLookup
from dagster_rebalance.core.model.offsets import Bounds, OffsetAndMetadata, TopicPartition
from dagster_rebalance.core.partitions.state_machine import Phase
from tests.core.story import play
from tests.core.world import Member, World, span, tp
from tests.story import stories

SETTINGS = {"ONE_RUN": EngineSettings(limits=BatchLimits(max_runs_in_flight=1))}

STORIES = """
## records_found_with_the_offset_are_claimed_at_once
join m 0 | fails ReadBounds | assign 0
claims 0 = 100:b1

## live_run_is_adopted_and_committed_by_the_new_owner
join old 1 | tick STARTED | join heir 1
log ~ adopted run1, which works on orders-0 [0, 100)
requests = none
succeed run1 | wait 1
commits = 0:100 | recorded = 0[0,100) run1

## run_that_succeeded_in_the_meantime_is_committed_at_once
join old 1 | tick STARTED | succeed run1 | join heir 1
commits = 0:100

## claim_without_a_run_is_requested_with_the_same_batch_id_and_bounds
join old 1 | produce 0 50 | join heir 1
requests = b1.1 0[0,100)

## claim_with_a_failed_run_is_requested_as_the_next_attempt
join old 1 | tick STARTED | run run1 FAILED | join heir 1
requests = b1.2 0[0,100)

## both_owners_of_a_batch_adopt_its_run_for_their_own_range
world 100 2 | join old 2 ONE_RUN | tick STARTED | join blue 0 | assign 0
requests = none
join green 0 | assign 1
requests = none
succeed run1 | wait 1 blue green
commits = 0:100, 1:100
as old
owns = 0 1

## both_owners_of_a_failed_batch_request_their_own_part
world 100 2 | join old 2 ONE_RUN | tick STARTED | run run1 FAILED | join blue 0 | assign 0
join green 0 | assign 1 | as blue | tick | as green | tick
start run2 | start run3 | succeed run2 | run run3 FAILED | wait 1 blue green
commits = 0:100 | requests = b1.3 1[0,100)

## unrecorded_commit_is_recorded_once_by_the_next_owner
join old 1 | tick STARTED | fails RecordCommits | succeed run1 | wait 1
offset 0 = 100 | recorded = none
join heir 1
recorded = 0[0,100) run1 late
wait 5 | join third 1
recorded = 0[0,100) run1 late

## moved_offset_is_accepted_and_noted
join old 1 | tick STARTED | succeed run1 | wait 1 | stored 0 40 | join heir 1
log ~ orders-0 continues at offset 40, which was set externally: the last recorded commit
claims 0 = 100:b2

## unanswered_reads_are_repeated
join m 0 | fails ReadStoredOffsets ReadRuns ReadBounds | assign 0 | wait 3
between ReadStoredOffsets 3 4 = True
answers | tick | wait 2
claims 0 = 100:b1

## two_runs_that_refused_each_other_are_followed_by_a_third
join zombie 1 | join heir 1 | add b1 0 0 100 STARTED | tick STARTED | refuse run1
start run2 | run run2 FAILED is_refused=1 | wait 1 | tick | start run3 | succeed run3 | wait 1
commits = 0:100

## unread_partition_does_not_disturb_the_others
world 100 2 | join m 1 | tick STARTED | fails ReadStoredOffsets | assign 1 | succeed run1 | wait 1
commits = 0:100 | phase 1 = RESTORING
"""


def read_parts(member: Member) -> list[frozenset[TopicPartition]]:
    reads = [one for one in member.done if isinstance(one, commands.ReadStoredOffsets)]
    return [frozenset(one.epochs) for one in reads]


@stories(STORIES)
def test_assignment(story: str) -> None:
    play(story, SETTINGS)


def test_new_attempt_of_the_next_owner_has_another_run_key() -> None:
    script = play("join old 1 | tick STARTED | run run1 FAILED | join heir 1")
    (key,) = {one.run_key for one in script.member.engine.batch_requests}
    assert key not in {one.run_key for one in script.members["old"].engine.batch_requests}


def test_commit_of_an_adopted_run_has_no_claim_time() -> None:
    script = play("join old 1 | tick STARTED | join heir 1 | succeed run1 | wait 1")
    (record,) = script.world.dagster.recorded
    assert (record.claim_to_commit_s, record.is_late) == (None, False)


def test_many_partitions_are_restored_in_parts_while_the_first_ones_are_claimed() -> None:
    script = play("world 1 1100 | join m 1100")
    reads = [
        at
        for at, one in enumerate(script.member.done)
        if isinstance(one, commands.ReadStoredOffsets)
    ]
    writes = [
        at for at, one in enumerate(script.member.done) if isinstance(one, commands.WriteOffsets)
    ]
    assert [len(one) for one in read_parts(script.member)] == [500, 500, 100]
    assert writes[0] < reads[1]
    assert script.member.engine.has_settled


def test_stored_offsets_without_an_answer_are_read_after_those_of_the_others() -> None:
    """The storage may fail for the first ones."""
    member = play("world 1 1100 | join m 0 | fails ReadStoredOffsets").member
    member.feed(events.PartitionsAssigned(tuple(map(tp, range(1100)))))
    member.world.wait(3.0, member)
    first, second, third, again = read_parts(member)
    assert [len(first), len(second), len(third)] == [500, 500, 100]
    assert len(first | second | third) == 1100
    assert again == first


def test_stored_offsets_are_read_at_once_while_a_leader_is_silent() -> None:
    """Each read would wait for the leader, whose partitions the answer lacks."""
    member = play("world 1 1100 | join m 0 | fails ReadStoredOffsets").member
    member.feed(events.PartitionsAssigned(tuple(map(tp, range(1100)))))
    for _ in range(3):
        member.feed(events.StoredOffsetsRead({}, {}))
    assert [len(one) for one in read_parts(member)] == [500, 600]
    member.world.wait(1.0, member)
    assert [len(one) for one in read_parts(member)] == [500, 600, 1100]


def test_next_stored_offsets_wait_for_the_runs_of_the_last_ones() -> None:
    """Each read of stored offsets makes earlier reads of runs stale."""
    script = play("world 1 600 | join m 0 | fails ReadRuns")
    script.member.feed(events.PartitionsAssigned(tuple(map(tp, range(600)))))
    script.play("wait 4.5")
    assert len(read_parts(script.member)) == 1
    script.play("wait 0.5")
    assert len(read_parts(script.member)) == 2
    script.play("answers | wait 1")
    assert script.member.engine.has_settled


def test_member_has_settled_when_it_has_claimed_available_records() -> None:
    """The first tick waits for that: its runs can be requested then."""
    script = play("join m 0")
    engine = script.member.engine
    assert not engine.has_settled, "no partition is assigned"
    script.play("fails ReadStoredOffsets | assign 0")
    assert not engine.has_settled, "the partition is restoring"
    script.play("answers | fails WriteOffsets | wait 2")
    assert not engine.has_settled, "the claim is not confirmed"
    script.play("answers | wait 2 | requests = b1.1 0[0,100)")
    assert engine.has_settled


def test_late_answers_of_an_earlier_epoch_are_ignored() -> None:
    """Another owner may have written while the partition was lost."""
    member = play("join m 0 | unanswered WriteOffsets | assign 0").member
    first = member.engine.partitions[tp(0)]
    assert first.pending is not None
    late = (
        events.OffsetsWritten((first.pending.write,)),
        events.StoredOffsetsRead(
            {tp(0): first.epoch, tp(9): 1},
            {tp(0): PartitionLookup(OffsetAndMetadata(77), Bounds(0, 100), LastRecorded(77))},
        ),
        events.CommitsRecorded(
            (commands.RecordCommit(span(0, 0, 77), first.epoch, "b", "r", 0, None, None),)
        ),
        events.BoundsRead({tp(0): Bounds(0, 1)}),
    )
    member.feed(events.PartitionsLost((tp(0),)))
    for event in late:
        member.feed(event)
    assert member.engine.partitions == {}
    member.fails.add(commands.ReadStoredOffsets)
    member.feed(events.PartitionsAssigned((tp(0),)))
    again = member.engine.partitions[tp(0)]
    assert again.epoch > first.epoch
    for event in late:
        member.feed(event)
    assert member.engine.partitions[tp(0)] == again
    assert again.phase is Phase.RESTORING


def test_second_answer_to_a_read_of_stored_offsets_is_ignored() -> None:
    """It may be older than the last write."""
    member = play("join m 1").member
    owned = member.engine.partitions[tp(0)]
    member.feed(
        events.StoredOffsetsRead({tp(0): owned.epoch}, {tp(0): PartitionLookup(None, Bounds(0, 5))})
    )
    assert member.engine.partitions[tp(0)] == owned


def test_partition_is_owned_when_the_runs_of_its_claims_and_all_live_runs_are_known() -> None:
    script = play("join old 1 | tick STARTED | join heir 0 | fails ReadRuns | assign 0")
    run, claims = script.world.dagster.runs["run1"], frozenset({"b1"})
    for event, phase in (
        (events.RunsRead(claims, (run,)), "RESTORING"),
        (events.RunsRead(frozenset(), (run,), with_live=True), "RESTORING"),
        (events.RunsRead(claims, (run,), with_live=True), "OWNED"),
    ):
        script.member.feed(event)
        script.play(f"phase = {phase}")


def test_second_answer_to_a_write_changes_nothing() -> None:
    script = play("join m 1 | tick STARTED | succeed run1 | unanswered WriteOffsets | wait 1")
    member = script.member
    pending = member.engine.partitions[tp(0)].pending
    assert pending is not None
    member.feed(events.OffsetsWritten((pending.write,)))
    once = member.engine.partitions[tp(0)]
    failed = ((pending.write, events.WriteFailure.CHANGED),)
    member.feed(events.OffsetsWritten((pending.write,), failed))
    assert member.engine.partitions[tp(0)] == once
    script.play("recorded = 0[0,100) run1")


def test_runs_read_before_a_revoke_do_not_finish_its_drain() -> None:
    """A tick may have started a run between that read and the revoke request."""
    world = World(records=10)
    member = world.member(owns=1)
    member.fails = {commands.ReadRuns}
    world.wait(2, member)
    for phase in (Phase.DRAINING, None):
        read = member.given(commands.ReadRuns)[-1]
        assert isinstance(read, commands.ReadRuns)
        if phase:
            member.feed(events.RevokeRequested((tp(0),)))
        member.feed(events.RunsRead(read.batch_ids, (), read.with_live, read.sequence))
        owned = member.engine.partitions.get(tp(0))
        assert (owned.phase if owned else None) is phase
