"""Giving partitions up: drain, commit, release; in time, and with a receipt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.batches.settings import (
    DeadlinePolicy,
    EngineSettings,
    HoldBudget,
    LeavePolicy,
    LossPolicy,
)
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.model.receipt import Cause, Outcome
from dagster_rebalance.core.model.run import RunState
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.reporting.explain import summary
from dagster_rebalance.core.runs.liveness import Liveness
from tests.core.world import Member, World, span, tp

SETTINGS = EngineSettings(
    limits=BatchLimits(max_ranges_per_run=1), budget=HoldBudget(30, 5), lease_s=1000
)
HAND_OVER = replace(SETTINGS, on_deadline=DeadlinePolicy.RELEASE)
TWO_CLAIMS = replace(
    SETTINGS, limits=BatchLimits(max_records_per_range=10, max_claims_per_partition=2)
)


def at_work(
    *, partitions: int = 1, settings: EngineSettings = SETTINGS, records: int = 100
) -> tuple[World, Member, list[str]]:
    """A member with a started run on each of its partitions, in order of the partitions."""
    world = World(records=records, partitions=partitions)
    member = world.member(owns=partitions, settings=settings)
    world.wait(1.25, member)
    runs = sorted(member.tick(), key=lambda run_id: world.dagster.runs[run_id].ranges)
    for run_id in runs:
        assert world.start(run_id) is None
    world.wait(1, member)
    return world, member, runs


def revoke(member: Member, *numbers: int) -> list[commands.Command]:
    """Kafka asks for partitions back."""
    return member.feed(events.RevokeRequested(tuple(tp(number) for number in numbers)))


def test_a_hold_that_takes_a_while_is_shown_once() -> None:
    """People see what is waited for before it is over; most holds are over sooner."""
    world, member, (first, _) = at_work(partitions=2)
    revoke(member, 0)
    world.wait(0.5, member)
    assert not [command for command in member.done if isinstance(command, commands.ShowHold)]
    world.wait(5, member)
    (shown,) = [command for command in member.done if isinstance(command, commands.ShowHold)]
    assert (shown.cause, shown.partitions, shown.run_ids) == (Cause.REVOKE, (tp(0),), (first,))
    assert str(shown) == "revoke of orders-0: held for 1 run at work, for at most 29 s"


@pytest.mark.parametrize(
    ("runs", "what"), [((), "what is to be committed"), (("a", "b"), "2 runs")]
)
def test_a_hold_says_what_it_is_for(runs: tuple[str, ...], what: str) -> None:
    """Also when only a commit is waited for."""
    assert f"held for {what}" in str(commands.ShowHold(Cause.LEAVE, (tp(0),), runs, 10.0))


def test_an_empty_hold_is_released_in_the_same_call() -> None:
    """Nothing to wait for must be detected exactly."""
    world = World(partitions=2)
    member = world.member(owns=2)
    revoke(member, 0)
    assert world.released_by == [(member, (tp(0),))]
    assert [receipt.outcome for receipt in member.receipts] == [Outcome.NOTHING_TO_DO]
    assert list(member.engine.partitions) == [tp(1)]
    assert member.engine.held == frozenset()


def test_a_hold_waits_for_the_run_commits_and_then_releases() -> None:
    """Drain, commit, record, release: in that order."""
    world, member, (run_id,) = at_work()
    revoke(member, 0)
    world.wait(5, member)
    assert world.released_by == []
    assert member.engine.held == {tp(0)}
    world.succeed(run_id)
    world.wait(0.25, member)
    (receipt,) = member.receipts
    assert (receipt.outcome, receipt.committed, receipt.run_ids, receipt.seconds) == (
        Outcome.DRAINED,
        {tp(0): 100},
        (run_id,),
        5.25,
    )
    assert world.dagster.recorded[0].drain_s == 5.25
    order = [
        type(c)
        for c in member.done
        if isinstance(c, commands.WriteOffsets | commands.RecordCommit | commands.RecordReceipt)
    ]
    assert order[-3:] == [commands.WriteOffsets, commands.RecordCommit, commands.RecordReceipt]
    assert member.engine.partitions == {}


@pytest.mark.parametrize("meanwhile", [commands.ReadStoredOffsets, commands.ReadRuns])
def test_a_revoke_of_a_partition_that_is_looked_up_again_waits_for_its_run(
    meanwhile: type[commands.Command],
) -> None:
    """A new leader was elected while it works, and brokers or Dagster are slow to answer."""
    world, member, (run_id,) = at_work()
    member.fails.add(meanwhile)
    world.kafka.elect(0)
    world.wait(5, member)
    assert member.engine.partitions[tp(0)].phase is Phase.RESTORING
    revoke(member, 0)
    member.fails.clear()
    world.wait(5, member)
    assert world.released_by == []
    world.succeed(run_id)
    world.wait(1, member)
    (receipt,) = member.receipts
    assert (receipt.outcome, receipt.committed, receipt.run_ids) == (
        Outcome.DRAINED,
        {tp(0): 100},
        (run_id,),
    )
    assert len(world.dagster.recorded) == 1


def test_a_commit_in_a_hold_names_the_log_that_its_run_has_read() -> None:
    """The log was truncated before the revoke, and nobody has looked.

    The next owner finds it by the epoch beside the offset.
    """
    world, member, (run_id,) = at_work()
    world.kafka.elect(0)
    world.wait(5, member)
    member.fails.add(commands.ReadStoredOffsets)
    world.kafka.elect(0, cut_at=50)
    world.kafka.produce(tp(0), 200)
    world.wait(5, member)
    revoke(member, 0)
    world.succeed(run_id)
    world.wait(1, member)
    assert world.kafka.commits == [(tp(0), 100)]
    heir = world.member(owns=1)
    world.wait(1, heir)
    assert "the log lost records before that offset" in heir.engine.partitions[tp(0)].stop_reason


def test_a_revoke_of_a_partition_whose_offset_somebody_has_moved_is_released_at_once() -> None:
    """What its member knew of it is wrong, and its runs are the next owner's."""
    world, member, _runs = at_work()
    world.kafka.stored[tp(0)] = OffsetAndMetadata(50, "")
    world.kafka.elect(0)
    member.fails.add(commands.ReadRuns)
    world.wait(5, member)
    assert member.engine.partitions[tp(0)].phase is Phase.RESTORING
    revoke(member, 0)
    assert world.released_by == [(member, (tp(0),))]


def test_retained_partitions_go_on_during_a_hold() -> None:
    """Full speed: they never wait for those that are given up."""
    world, member, runs = at_work(partitions=2)
    revoke(member, 0)
    for _ in range(3):
        world.succeed(runs[1])
        world.kafka.produce(tp(1), 10)
        member.tick()
        world.wait(2, member)
        (runs[1],) = member.tick(state=RunState.STARTED)
    assert world.kafka.commits == [(tp(1), 100), (tp(1), 110), (tp(1), 120)]
    assert world.released_by == []


def test_no_new_work_starts_on_a_held_partition() -> None:
    """Steady production with small batches must not prolong a hold."""
    world, member, (run_id,) = at_work(settings=TWO_CLAIMS, records=10)
    revoke(member, 0)
    world.kafka.produce(tp(0), 100)
    member.tick()
    world.wait(5, member)
    assert world.kafka.claims(0) == [(10, "b1")]
    assert list(world.dagster.runs) == [run_id]


def test_one_slow_partition_of_a_hold_does_not_keep_the_others_from_committing() -> None:
    """All are released together, but what is done is done."""
    world, member, (fast, slow) = at_work(partitions=2)
    revoke(member, 0, 1)
    world.succeed(fast)
    world.wait(2, member)
    assert world.kafka.commits == [(tp(0), 100)]
    assert member.engine.partitions[tp(0)].phase is Phase.DRAINED
    assert world.released_by == []
    world.succeed(slow)
    world.wait(1, member)
    assert world.released_by == [(member, (tp(0), tp(1)))]
    assert member.receipts[0].committed == {tp(0): 100, tp(1): 100}


def test_a_queued_run_is_cancelled_at_once() -> None:
    """Work that never started is not waited for, and does not count as a failure."""
    world = World(records=100)
    member = world.member(owns=1, settings=SETTINGS)
    (run_id,) = member.tick()
    world.wait(1, member)
    decided = revoke(member, 0)
    assert any(
        isinstance(command, commands.CancelRuns) and command.run_ids == (run_id,)
        for command in decided
    )
    assert [(r.outcome, r.cancelled, r.handed_over) for r in member.receipts] == [
        (Outcome.DRAINED, (run_id,), (tp(0),))
    ]
    assert world.kafka.claims(0) == [(100, "b1")]
    heir = world.member(owns=1)
    (batch_request,) = heir.engine.batch_requests
    assert (batch_request.batch_id, batch_request.attempt, batch_request.ranges) == (
        "b1",
        2,
        (span(0, 0, 100),),
    )


def test_a_run_that_is_being_launched_is_cancelled_at_once() -> None:
    """On Kubernetes a pod waits minutes for its node.

    Without the cancel, a revoke would take its full time although nothing works.
    """
    world = World(records=100)
    member = world.member(owns=1, settings=SETTINGS)
    (run_id,) = member.tick(state=RunState.STARTING)
    world.wait(1, member)
    revoke(member, 0)
    assert world.dagster.runs[run_id].state is RunState.CANCELING
    world.dagster.move(run_id, RunState.CANCELED)
    world.wait(1, member)
    assert [(r.outcome, r.cancelled, r.handed_over) for r in member.receipts] == [
        (Outcome.DRAINED, (run_id,), (tp(0),))
    ]


def test_a_run_that_starts_although_its_launcher_was_to_cancel_it_is_waited_for() -> None:
    """Dagster's default launcher cannot cancel what it launches.

    Work that began is not thrown away, and the receipt says what happened.
    """
    world = World(records=100)
    member = world.member(owns=1, settings=SETTINGS)
    (run_id,) = member.tick(state=RunState.STARTING)
    world.wait(1, member)
    member.fails.add(commands.CancelRuns)
    revoke(member, 0)
    world.wait(2.25, member)
    asked = len(member.given(commands.CancelRuns))
    assert asked == 3
    assert world.start(run_id) is None
    world.wait(3, member)
    assert len(member.given(commands.CancelRuns)) == asked
    world.succeed(run_id)
    world.wait(1, member)
    (receipt,) = member.receipts
    assert (receipt.outcome, receipt.committed, receipt.cancelled) == (
        Outcome.DRAINED,
        {tp(0): 100},
        (),
    )


@pytest.mark.parametrize("state", [RunState.WAITING, RunState.STARTING])
def test_a_run_that_started_since_the_last_look_is_waited_for(state: RunState) -> None:
    """What the member knows of its runs is up to a second old when it is asked for a partition."""
    world = World(records=100)
    member = world.member(owns=1, settings=SETTINGS)
    (run_id,) = member.tick(state=state)
    world.wait(1, member)
    assert world.start(run_id) is None
    revoke(member, 0)
    world.wait(3, member)
    assert world.dagster.runs[run_id].state is RunState.STARTED
    world.succeed(run_id)
    world.wait(1, member)
    (receipt,) = member.receipts
    assert (receipt.outcome, receipt.committed, receipt.cancelled) == (
        Outcome.DRAINED,
        {tp(0): 100},
        (),
    )


def test_the_receipt_does_not_say_cancelled_of_a_run_that_was_left_alone() -> None:
    """It had started before the member could take it back, and worked on beyond the deadline."""
    world = World(records=100)
    member = world.member(owns=1, settings=replace(SETTINGS, on_deadline=DeadlinePolicy.RELEASE))
    (run_id,) = member.tick()
    world.wait(1, member)
    assert world.start(run_id) is None
    revoke(member, 0)
    world.wait(60, member)
    (receipt,) = member.receipts
    assert (receipt.outcome, receipt.run_ids, receipt.cancelled) == (
        Outcome.DEADLINE,
        (run_id,),
        (),
    )


def test_a_cancellation_that_did_not_work_is_given_again() -> None:
    """Dagster was away, or the run was just being launched."""
    world = World(records=100)
    member = world.member(owns=1, settings=SETTINGS)
    (run_id,) = member.tick()
    world.wait(1, member)
    member.fails.add(commands.CancelRuns)
    revoke(member, 0)
    world.wait(2.25, member)
    assert len(member.given(commands.CancelRuns)) == 3
    member.fails.clear()
    world.wait(1.25, member)
    assert world.dagster.runs[run_id].state is RunState.CANCELED
    assert world.released_by == [(member, (tp(0),))]


def test_a_run_that_appears_in_the_queue_during_a_hold_is_cancelled_too() -> None:
    """A tick handed the offer out right before the revoke."""
    world = World(records=100, partitions=2)
    member = world.member(owns=2, settings=SETTINGS)
    first, second = member.engine.batch_requests
    world.dagster.request(first, RunState.STARTED)
    world.wait(1, member)
    revoke(member, 0, 1)
    late = world.dagster.request(second)
    assert late is not None
    world.wait(1, member)
    assert world.dagster.runs[late].state is RunState.CANCELED


def test_a_queued_run_that_a_retained_partition_shares_is_asked_for_again_without_it() -> None:
    """The batch is cut; each part keeps its bounds and its batch id."""
    world = World(records=100, partitions=2)
    member = world.member(
        owns=2, settings=replace(SETTINGS, limits=BatchLimits(max_runs_in_flight=1))
    )
    (run_id,) = member.tick()
    world.wait(1, member)
    revoke(member, 0)
    assert world.dagster.runs[run_id].state is RunState.CANCELED
    (batch_request,) = member.engine.batch_requests
    assert (batch_request.batch_id, batch_request.attempt, batch_request.ranges) == (
        "b1",
        2,
        (span(1, 0, 100),),
    )


def test_the_runs_are_looked_up_once_more_before_a_partition_counts_as_drained() -> None:
    """What was last seen may be older than the hold."""
    world = World(records=100)
    member = world.member(owns=1, settings=SETTINGS)
    member.fails.add(commands.ReadRuns)
    member.tick(state=RunState.STARTED)
    revoke(member, 0)
    world.wait(2, member)
    assert world.released_by == []
    member.fails.clear()
    world.wait(2, member)
    assert world.released_by == []
    assert member.engine.holds[0].run_ids == {"run1"}


def test_a_run_that_fails_during_a_hold_leaves_its_claim_to_the_next_owner() -> None:
    """It is not asked for again here: that would prolong the hold."""
    world, member, (run_id,) = at_work()
    revoke(member, 0)
    world.dagster.move(run_id, RunState.FAILED)
    world.wait(1, member)
    assert [(r.outcome, r.handed_over) for r in member.receipts] == [(Outcome.DRAINED, (tp(0),))]
    assert world.kafka.claims(0) == [(100, "b1")]


def test_at_the_deadline_runs_are_cancelled_and_the_release_waits_until_they_ended() -> None:
    """Policy `cancel`: no run of ours is live when the partition goes."""
    world, member, (run_id,) = at_work()
    revoke(member, 0)
    world.wait(24.75, member)
    assert member.given(commands.CancelRuns) == []
    world.wait(0.25, member)
    assert world.dagster.runs[run_id].state is RunState.CANCELING
    world.wait(3, member)
    assert world.released_by == []
    world.dagster.move(run_id, RunState.CANCELED)
    world.wait(0.25, member)
    (receipt,) = member.receipts
    assert (receipt.outcome, receipt.cancelled, receipt.handed_over) == (
        Outcome.DEADLINE,
        (run_id,),
        (tp(0),),
    )
    assert receipt.seconds <= 30


def test_a_run_that_does_not_end_when_cancelled_is_handed_over_at_the_limit() -> None:
    """Kafka would fence the member else; the next owner adopts it through its claim."""
    world, member, (run_id,) = at_work()
    revoke(member, 0)
    world.wait(29.75, member)
    assert world.released_by == []
    world.wait(0.25, member)
    assert world.released_by == [(member, (tp(0),))]
    assert [(r.outcome, r.seconds, r.handed_over) for r in member.receipts] == [
        (Outcome.DEADLINE, 30.0, (tp(0),))
    ]
    heir = world.member(owns=1)
    assert heir.engine.partitions[tp(0)].live_runs == {run_id}


def test_at_the_deadline_runs_are_handed_over() -> None:
    """Policy `release`: they go on, and the next owner commits them."""
    world, member, (run_id,) = at_work(settings=HAND_OVER)
    revoke(member, 0)
    world.wait(25, member)
    assert member.given(commands.CancelRuns) == []
    assert [(r.outcome, r.handed_over) for r in member.receipts] == [(Outcome.DEADLINE, (tp(0),))]
    world.succeed(run_id)
    heir = world.member(owns=1)
    assert world.kafka.commits == [(tp(0), 100)]
    assert [record.run_id for record in world.dagster.recorded] == [run_id]
    assert heir.engine.partitions[tp(0)].entries == ()


@pytest.mark.parametrize("settings", [SETTINGS, HAND_OVER], ids=["cancel", "release"])
def test_a_run_that_ends_at_the_deadline_is_still_committed_within_the_slice(
    settings: EngineSettings,
) -> None:
    """The slice is kept for exactly that, under both policies."""
    world, member, (run_id,) = at_work(settings=settings)
    revoke(member, 0)
    member.fails.add(commands.WriteOffsets)
    world.wait(24.5, member)
    world.succeed(run_id)
    world.wait(2, member)
    assert world.released_by == []
    member.fails.clear()
    world.wait(2, member)
    assert world.kafka.commits == [(tp(0), 100)]
    (receipt,) = member.receipts
    assert (receipt.outcome, receipt.committed, receipt.handed_over) == (
        Outcome.DRAINED,
        {tp(0): 100},
        (),
    )


def test_a_commit_that_is_not_confirmed_is_forgotten_at_the_limit() -> None:
    """Its late answer must not reach a partition that has been given up."""
    world, member, (run_id,) = at_work()
    member.feed(events.LeaveRequested("shutdown"))
    world.succeed(run_id)
    member.fails.add(commands.WriteOffsets)
    world.wait(29, member)
    pending = member.engine.partitions[tp(0)].pending
    assert pending is not None
    world.wait(1, member)
    assert member.left == "shutdown"
    writes = len(member.given(commands.WriteOffsets))
    member.feed(events.OffsetsWritten((), ((pending.write, events.WriteFailure.CHANGED),)))
    world.wait(5, member)
    assert len(member.given(commands.WriteOffsets)) == writes
    assert member.engine.partitions[tp(0)].phase is Phase.DRAINED


def test_partitions_lost_during_a_hold_give_one_receipt_and_no_write() -> None:
    """The member was fenced: somebody else owns them already."""
    world, member, (run_id, _) = at_work(partitions=2)
    revoke(member, 0, 1)
    world.wait(2, member)
    member.feed(events.PartitionsLost((tp(0), tp(1))))
    writes = len(member.given(commands.WriteOffsets))
    world.succeed(run_id)
    world.wait(40, member)
    assert [(r.outcome, r.partitions, r.handed_over) for r in member.receipts] == [
        (Outcome.LOST, (tp(0), tp(1)), (tp(0), tp(1)))
    ]
    assert len(member.given(commands.WriteOffsets)) == writes
    assert world.released_by == []
    assert member.engine.holds == ()


def test_a_run_is_waited_for_also_when_somebody_else_has_moved_the_offset() -> None:
    """Its partition must not be given away under it, and nothing is committed over the offset."""
    world, member, (run_id,) = at_work()
    revoke(member, 0)
    owned = member.engine.partitions[tp(0)]
    pending = owned.claim_write("b9", 500, world.now)
    member.engine.partitions[tp(0)] = replace(owned, pending=pending)
    failed = ((pending.write, events.WriteFailure.CHANGED),)
    member.feed(events.OffsetsWritten((), failed))
    world.wait(5, member)
    assert world.released_by == []
    world.succeed(run_id)
    world.wait(2, member)
    assert world.released_by == [(member, (tp(0),))]
    assert world.kafka.commits == []


def test_a_receipt_of_a_loss_names_only_what_was_lost() -> None:
    """The rest of the hold goes on, and gets its own."""
    world, member, (first, second) = at_work(partitions=2)
    revoke(member, 0, 1)
    world.succeed(first)
    world.wait(1, member)
    member.feed(events.PartitionsLost((tp(1),)))
    world.wait(1, member)
    assert [(r.outcome, r.partitions, r.committed) for r in member.receipts] == [
        (Outcome.LOST, (tp(1),), {}),
        (Outcome.DRAINED, (tp(0),), {tp(0): 100}),
    ]
    assert world.dagster.runs[second].state is RunState.STARTED


def test_a_superseded_hold_is_neither_released_nor_committed() -> None:
    """The stale unassign must never be sent; retained partitions stay."""
    world, member, (run_id, _) = at_work(partitions=2)
    revoke(member, 0)
    member.feed(events.PartitionsLost((tp(0),), events.LostReason.SUPERSEDED))
    world.succeed(run_id)
    world.wait(40, member)
    assert [(r.outcome, r.partitions) for r in member.receipts] == [(Outcome.SUPERSEDED, (tp(0),))]
    assert world.released_by == []
    assert world.kafka.commits == []
    assert list(member.engine.partitions) == [tp(1)]


@pytest.mark.parametrize(
    ("policy", "state"),
    [(LossPolicy.LEAVE, RunState.STARTED), (LossPolicy.CANCEL, RunState.CANCELING)],
)
def test_runs_of_lost_partitions_are_left_or_cancelled(policy: LossPolicy, state: RunState) -> None:
    """As the settings say."""
    world, member, (run_id,) = at_work(settings=replace(SETTINGS, on_lost=policy))
    member.feed(events.PartitionsLost((tp(0), tp(7))))
    assert world.dagster.runs[run_id].state is state
    assert member.receipts == []


def test_the_runs_of_a_lost_partition_are_cancelled_also_while_it_is_looked_up_again() -> None:
    """They are those that it knew before."""
    world, member, (run_id,) = at_work(settings=replace(SETTINGS, on_lost=LossPolicy.CANCEL))
    member.fails.add(commands.ReadRuns)
    world.kafka.elect(0)
    world.wait(5, member)
    member.feed(events.PartitionsLost((tp(0),)))
    assert world.dagster.runs[run_id].state is RunState.CANCELING


def test_a_partition_is_revoked_while_it_is_taken_in() -> None:
    """Nothing was started for it: it goes at once, whatever its claims say."""
    world = World(records=100)
    first = world.member(owns=1)
    first.tick(state=RunState.STARTED)
    member = world.member()
    member.fails.add(commands.ReadStoredOffsets)
    member.feed(events.PartitionsAssigned((tp(0),)))
    revoke(member, 0)
    assert world.released_by == [(member, (tp(0),))]
    assert member.given(commands.WriteOffsets) == []


def test_a_revoke_while_a_claim_is_unanswered_is_released_at_once() -> None:
    """No run was asked for it; if the claim was written, the next owner asks."""
    world = World(records=100)
    member = world.member()
    world.kafka.stored[tp(0)] = OffsetAndMetadata(0)
    member.unanswered.add(commands.WriteOffsets)
    member.feed(events.PartitionsAssigned((tp(0),)))
    assert world.kafka.claims(0) == [(100, "b1")]
    revoke(member, 0)
    assert world.released_by == [(member, (tp(0),))]
    heir = world.member(owns=1)
    assert [batch_request.batch_id for batch_request in heir.engine.batch_requests] == ["b1"]


def test_a_claim_unanswered_at_a_revoke_does_not_keep_an_earlier_batch_from_its_commit() -> None:
    """What Kafka stores must be known again before the commit: the write is followed up."""
    world, member, (run_id,) = at_work(settings=TWO_CLAIMS, records=10)
    world.kafka.produce(tp(0), 10)
    member.unanswered.add(commands.WriteOffsets)
    member.tick()
    world.wait(1.25, member)
    assert world.kafka.claims(0) == [(10, "b1"), (20, "b2")]
    revoke(member, 0)
    member.unanswered.clear()
    world.succeed(run_id)
    world.wait(2, member)
    assert world.kafka.commits == [(tp(0), 10)]
    assert [(r.outcome, r.committed, r.handed_over) for r in member.receipts] == [
        (Outcome.DRAINED, {tp(0): 10}, (tp(0),))
    ]


def test_a_stored_value_changed_during_a_hold_ends_the_drain_without_a_write() -> None:
    """There is nothing left that this member may commit."""
    world, member, (run_id,) = at_work()
    revoke(member, 0)
    world.kafka.stored[tp(0)] = OffsetAndMetadata(7)
    world.succeed(run_id)
    world.wait(1, member)
    assert world.kafka.stored[tp(0)] == OffsetAndMetadata(7)
    assert world.released_by == [(member, (tp(0),))]


def test_a_stopped_partition_is_given_up_at_once_and_no_longer_shown_by_this_member() -> None:
    """The next owner says it again if it still holds."""
    world, member, (run_id,) = at_work(settings=replace(SETTINGS, max_attempts=1))
    world.dagster.move(run_id, RunState.FAILED)
    world.wait(1, member)
    assert len(member.shown) == 1
    revoke(member, 0)
    assert member.shown[1:] == [(tp(0), "")]
    assert world.released_by == [(member, (tp(0),))]
    heir = world.member(owns=1, settings=replace(SETTINGS, max_attempts=1))
    assert heir.engine.partitions[tp(0)].phase is Phase.STOPPED
    heir.feed(events.PartitionsLost((tp(0),)))
    assert [reason == "" for _, reason in heir.shown] == [False, True]


def test_a_leave_drains_everything_and_then_leaves() -> None:
    """A deploy: claims are left, runs are waited for, then the member goes."""
    world, member, (first, second) = at_work(partitions=2)
    member.feed(events.LeaveRequested("a reload"))
    member.feed(events.LeaveRequested("again"))
    world.succeed(first)
    world.wait(2, member)
    assert member.left is None
    assert member.engine.held == frozenset()
    world.succeed(second)
    world.wait(1, member)
    assert member.left == "a reload"
    assert [(r.cause, r.outcome) for r in member.receipts] == [(Cause.LEAVE, Outcome.DRAINED)]
    assert world.released_by == []


@pytest.mark.parametrize(("limit_s", "seconds"), [(8.0, 8.0), (0.0, 0.25), (500.0, 30.0)])
def test_a_leave_keeps_its_limit(limit_s: float, seconds: float) -> None:
    """A shutdown has less time than a hold, never more."""
    world, member, _ = at_work()
    member.feed(events.LeaveRequested("shutdown", limit_s))
    world.wait(seconds - 0.25, member)
    assert member.left is None
    world.wait(0.25, member)
    assert member.left == "shutdown"


def test_a_leave_for_a_successor_commits_what_is_done_and_goes_at_once() -> None:
    """A reload must stand no partition still for the longest run of the old process.

    The successor adopts the runs at work.
    """
    world, member, (done, at_work_) = at_work(partitions=2)
    world.succeed(done)
    member.feed(events.LeaveRequested("a reload", has_successor=True))
    world.wait(1, member)
    assert member.left == "a reload"
    assert world.kafka.commits == [(tp(0), 100)]
    assert [(r.outcome, r.cancelled, r.handed_over) for r in member.receipts] == [
        (Outcome.HANDED_OVER, (), (tp(1),))
    ]
    assert str(member.receipts[0]).endswith(
        "2 runs still working; unfinished claim on orders-1 goes to the next owner"
    )
    heir = world.member(owns=2)
    assert world.dagster.runs[at_work_].state is RunState.STARTED
    assert heir.engine.partitions[tp(1)].live_runs == {at_work_}


def test_a_revoke_under_way_is_handed_over_with_the_leave_for_a_successor() -> None:
    """A revoke is already under way when the member finds its successor.

    Kafka asks for a share of the partitions as soon as the successor joins.
    """
    world, member, runs = at_work(partitions=2)
    revoke(member, 1)
    world.wait(1, member)
    member.feed(events.LeaveRequested("a reload", has_successor=True))
    world.wait(1, member)
    assert [(r.cause, r.outcome) for r in member.receipts] == [
        (Cause.REVOKE, Outcome.HANDED_OVER),
        (Cause.LEAVE, Outcome.HANDED_OVER),
    ]
    assert {world.dagster.runs[run_id].state for run_id in runs} == {RunState.STARTED}


def test_a_queued_run_is_not_cancelled_for_a_successor() -> None:
    """The successor adopts it; cancelling it would only cost the place in the queue."""
    world = World(records=100)
    member = world.member(owns=1, settings=SETTINGS)
    (run_id,) = member.tick()
    world.wait(1, member)
    member.feed(events.LeaveRequested("a reload", has_successor=True))
    world.wait(0.25, member)
    assert member.left == "a reload"
    assert world.dagster.runs[run_id].state is RunState.WAITING


def test_a_member_that_is_to_drain_waits_for_its_runs_also_before_a_successor() -> None:
    """`on_leave="drain"`, for runs that end with their code server."""
    world, member, (run_id,) = at_work(settings=replace(SETTINGS, on_leave=LeavePolicy.DRAIN))
    member.feed(events.LeaveRequested("a reload", has_successor=True))
    world.wait(5, member)
    assert member.left is None
    world.succeed(run_id)
    world.wait(1, member)
    assert [r.outcome for r in member.receipts] == [Outcome.DRAINED]


def test_a_hand_over_waits_for_dagster_no_longer_than_for_the_last_commit() -> None:
    """While Dagster's storage is away nobody knows what is done; the claims tell the successor."""
    world, member, (run_id,) = at_work()
    member.fails.add(commands.ReadRuns)
    world.succeed(run_id)
    member.feed(events.LeaveRequested("a reload", has_successor=True))
    world.wait(4.75, member)
    assert member.left is None
    assert "handing over to the successor orders-0" in " ".join(summary(member.engine, world.now))
    world.wait(0.25, member)
    assert member.left == "a reload"
    assert world.kafka.claims(0) == [(100, "b1")]


@pytest.mark.parametrize(
    "second",
    [events.LeaveRequested("shutdown", 8.0), events.LeaveRequested("a reload", has_successor=True)],
)
def test_a_later_request_hastens_a_leave(second: events.LeaveRequested) -> None:
    """A code server is killed when its grace period is over.

    That also holds if the member began to leave slowly before.
    """
    world, member, _ = at_work()
    member.feed(events.LeaveRequested("its sensor is off"))
    world.wait(10, member)
    member.feed(second)
    world.wait(8, member)
    assert member.left == "its sensor is off"


def test_a_later_request_never_prolongs_a_leave() -> None:
    """The first limit was given for a reason as well."""
    world, member, _ = at_work()
    member.feed(events.LeaveRequested("shutdown", 8.0))
    world.wait(4, member)
    member.feed(events.LeaveRequested("its sensor is off"))
    world.wait(4, member)
    assert member.left == "shutdown"


def test_a_leave_without_partitions_is_immediate_and_needs_no_receipt() -> None:
    """Before the first assignment."""
    world = World()
    member = world.member()
    member.feed(events.LeaveRequested("shutdown"))
    assert member.left == "shutdown"
    assert member.receipts == []


def test_a_leave_whose_partitions_are_lost_ends_with_one_receipt() -> None:
    """Fenced while draining for a deploy."""
    world, member, _ = at_work()
    member.feed(events.LeaveRequested("a reload"))
    member.feed(events.PartitionsLost((tp(0),)))
    assert member.left == "a reload"
    assert [r.outcome for r in member.receipts] == [Outcome.LOST]
    assert world.kafka.commits == []


def test_a_partition_revoked_during_a_leave_is_released_as_soon_as_it_is_drained() -> None:
    """The others go on draining; each hold has its receipt."""
    world, member, (first, second) = at_work(partitions=2)
    member.feed(events.LeaveRequested("a reload", 20.0))
    world.wait(1, member)
    revoke(member, 0)
    world.succeed(first)
    world.wait(1, member)
    assert world.released_by == [(member, (tp(0),))]
    assert member.left is None
    world.succeed(second)
    world.wait(1, member)
    assert member.left == "a reload"
    assert [(r.cause, r.partitions) for r in member.receipts] == [
        (Cause.REVOKE, (tp(0),)),
        (Cause.LEAVE, (tp(0), tp(1))),
    ]


def test_the_limit_of_a_leave_also_ends_the_hold_of_a_revoke() -> None:
    """The member cannot stay longer for it; the release and both receipts come before the leave."""
    world, member, (run_id,) = at_work()
    member.feed(events.LeaveRequested("shutdown", 8.0))
    world.wait(2, member)
    revoke(member, 0)
    world.wait(6, member)
    assert member.left == "shutdown"
    assert world.released_by == [(member, (tp(0),))]
    assert [(r.cause, r.outcome) for r in member.receipts] == [
        (Cause.REVOKE, Outcome.DEADLINE),
        (Cause.LEAVE, Outcome.DEADLINE),
    ]
    assert world.dagster.runs[run_id].state is RunState.CANCELING


def test_a_partition_assigned_while_leaving_is_never_worked_on() -> None:
    """Another member left at the same time; Kafka may give it to us and take it again."""
    world, member, (run_id,) = at_work()
    member.feed(events.LeaveRequested("a reload"))
    world.kafka.produce(tp(5), 100)
    decided = member.feed(events.PartitionsAssigned((tp(5),)))
    assert not any(
        isinstance(command, commands.ReadStoredOffsets | commands.WriteOffsets)
        for command in decided
    )
    revoke(member, 5)
    assert world.released_by == [(member, (tp(5),))]
    world.succeed(run_id)
    world.wait(1, member)
    assert member.left == "a reload"
    assert tp(5) not in world.kafka.stored


def test_a_member_without_ticks_drains_and_leaves() -> None:
    """The lease: a sensor that is switched off must not hoard partitions."""
    world, member, (run_id,) = at_work(
        settings=replace(SETTINGS, lease_s=60, pulse=Liveness(heartbeat_timeout_s=1000))
    )
    world.wait(58, member)
    assert member.engine.leaving is None
    world.wait(3, member)
    assert member.engine.leaving is not None
    assert member.engine.leaving.startswith("its sensor has not ticked for 6")
    world.succeed(run_id)
    world.wait(1, member)
    assert world.kafka.offset(0) == 100
    assert member.left == member.engine.leaving


def test_the_memory_is_flat_over_a_thousand_rebalances() -> None:
    """Counters that grow or do not return to zero are the classic bug."""
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
        revoke(member, 0, 1)
        member.feed(events.PartitionsLost((tp(2),)))
        for run_id in world.dagster.runs:
            if world.dagster.runs[run_id].state is RunState.STARTED:
                world.dagster.move(run_id, RunState.FAILED, is_taken_back=True)
        world.wait(1, member, step=1)
        world.dagster.runs.clear()
        world.dagster.keys.clear()
        member.done.clear()
    engine = member.engine
    assert (dict(engine.partitions), engine.holds, engine.batch_requests, engine.held) == (
        {},
        (),
        (),
        frozenset(),
    )
    member.feed(events.RunsRead(frozenset(), ()))
    assert engine.pulse.signs == {}
