"""People pause, stop and resume partitions: what the engine makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.batches.settings import EngineSettings
from dagster_rebalance.core.engine.dead_letter_policy import is_wanted
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.model.run import RunState
from dagster_rebalance.core.partitions.owned import PendingWrite
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.reporting.explain import explain_partition, summary
from dagster_rebalance.core.runs.progress import Exhausted
from dagster_rebalance.core.runs.retry import RetryPace
from dagster_rebalance.core.runs.stream_batch import Outcome
from tests.core.streams import Stream
from tests.core.world import Member, World, span, tp

if TYPE_CHECKING:
    from dagster_rebalance.core.partitions.owned import OwnedPartition

_NOT_TOGETHER = EngineSettings(limits=BatchLimits(max_ranges_per_run=1))


def give(world: World, action: Action, partitions: str = "orders:0", by: str = "ada") -> Directive:
    """Somebody gives an order."""
    order = Directive(action, partitions, by, 1_700_000_000.0, "the warehouse is away")
    world.orders.append(order)
    return order


def notes(member: Member) -> list[str]:
    """What a member has noted."""
    return [command.text for command in member.done if isinstance(command, commands.Note)]


def heard(world: World, *members: Member) -> None:
    """The members have read it by now."""
    world.wait(4.0, *members)


def owned(member: Member, number: int = 0) -> OwnedPartition:
    """A partition of a member."""
    return member.engine.partitions[tp(number)]


@pytest.mark.parametrize("action", [Action.PAUSE, Action.STOP])
def test_nothing_new_is_claimed_of_a_paused_partition(action: Action) -> None:
    """Only that partition stands, and it goes on where it stood."""
    world = World(partitions=2)
    member = world.member(owns=2, settings=_NOT_TOGETHER)
    give(world, action)
    heard(world, member)
    world.kafka.produce(tp(0), 5)
    world.kafka.produce(tp(1), 5)
    heard(world, member)
    assert [batch_request.ranges for batch_request in member.engine.batch_requests] == [
        (span(1, 0, 5),)
    ]
    assert world.kafka.claims(0) == []
    give(world, Action.RESUME)
    heard(world, member)
    (run,) = [run for run in member.tick() if span(0, 0, 5) in world.dagster.runs[run].ranges]
    assert world.start(run) is None


def test_what_is_at_work_ends_and_is_committed_although_the_partition_is_paused() -> None:
    """A pause takes nothing back."""
    world = World(records=5)
    member = world.member(owns=1)
    member.pass_time()
    (run,) = member.tick()
    world.start(run)
    give(world, Action.PAUSE)
    heard(world, member)
    assert member.given(commands.CancelRuns) == []
    world.succeed(run)
    world.kafka.produce(tp(0), 5)
    heard(world, member)
    assert world.kafka.offset(0) == 5
    assert world.kafka.claims(0) == []
    assert tp(0) in member.engine.partitions


def test_a_run_that_has_not_started_is_taken_back_and_asked_for_again_after_the_resume() -> None:
    """It would begin later, and that is no attempt."""
    world = World(records=5)
    member = world.member(owns=1)
    member.pass_time()
    (run,) = member.tick()
    give(world, Action.PAUSE)
    heard(world, member)
    assert world.dagster.runs[run].state is RunState.CANCELED
    assert member.tick() == []
    give(world, Action.RESUME)
    heard(world, member)
    assert [
        (batch_request.attempt, batch_request.failures)
        for batch_request in member.engine.batch_requests
    ] == [(2, 0)]


def test_stop_cancels_what_is_at_work_and_counts_no_attempt() -> None:
    """The same range is done again with the same bounds."""
    world = World(records=5)
    member = world.member(owns=1)
    member.pass_time()
    (run,) = member.tick()
    world.start(run)
    give(world, Action.STOP)
    heard(world, member)
    assert world.dagster.runs[run].state is RunState.CANCELING
    cancel = member.given(commands.CancelRuns)[0]
    assert isinstance(cancel, commands.CancelRuns)
    assert cancel.reason == (
        "orders:0 was stopped by ada since 2023-11-14 22:13:20 UTC: the warehouse is away"
    )
    assert len(member.given(commands.CancelRuns)) < 5, "asked for again, but not each turn"
    world.dagster.move(run, RunState.CANCELED)
    heard(world, member)
    assert member.tick() == []
    give(world, Action.RESUME)
    heard(world, member)
    assert [(o.ranges, o.failures) for o in member.engine.batch_requests] == [((span(0, 0, 5),), 0)]


def test_a_run_that_no_launcher_reaches_is_asked_to_end_less_and_less_often() -> None:
    """Each time costs two events in its log."""
    world = World(records=5)
    member = world.member(owns=1)
    member.pass_time()
    (run,) = member.tick()
    world.start(run)
    give(world, Action.STOP)
    for _ in range(24):
        member.feed(events.TickArrived())
        world.dagster.move(run, RunState.STARTED, heartbeat=f"at {world.now}")
        world.wait(5.0, member)
    assert 3 < len(member.given(commands.CancelRuns)) < 12


def test_stop_cancels_a_run_that_a_partition_waits_for_before_it_is_taken_in() -> None:
    """It works on the partition, although an operator has erased its claim."""
    world = World(records=100)
    member = world.member(owns=1)
    (run,) = member.tick()
    world.start(run)
    world.kafka.stored[tp(0)] = OffsetAndMetadata(50)
    lost = (tp(0),)
    member.feed(events.PartitionsLost(lost))
    member.feed(events.PartitionsAssigned(lost))
    world.wait(5, member)
    assert owned(member).blocked_by == (run,)
    give(world, Action.STOP)
    heard(world, member)
    assert world.dagster.runs[run].state is RunState.CANCELING


def test_a_run_of_several_ranges_is_stopped_as_a_whole_and_the_others_go_on() -> None:
    """A run cannot be cancelled in part."""
    world = World(records=5, partitions=2)
    settings = EngineSettings(limits=BatchLimits(max_runs_in_flight=1))
    member = world.member(owns=2, settings=settings)
    member.pass_time()
    (run,) = member.tick()
    world.start(run)
    give(world, Action.STOP)
    heard(world, member)
    world.dagster.move(run, RunState.CANCELED)
    heard(world, member)
    assert [batch_request.ranges for batch_request in member.engine.batch_requests] == [
        (span(1, 0, 5),)
    ]


def test_a_paused_partition_is_given_back_and_its_next_owner_knows_before_it_claims() -> None:
    """Pauses outlive every member, and hold no revoke up."""
    world = World(records=5)
    first = world.member(owns=1)
    give(world, Action.PAUSE)
    heard(world, first)
    first.feed(events.RevokeRequested((tp(0),)))
    heard(world, first)
    assert tp(0) not in first.engine.partitions
    second = world.member(owns=1)
    heard(world, second)
    assert owned(second).order is not None
    assert second.engine.batch_requests == ()


def test_stop_cancels_what_a_hold_waits_for() -> None:
    """The people's word comes before the time of the hold."""
    world = World(records=5)
    member = world.member(owns=1)
    member.pass_time()
    (run,) = member.tick()
    world.start(run)
    member.feed(events.RevokeRequested((tp(0),)))
    give(world, Action.STOP)
    heard(world, member)
    assert world.dagster.runs[run].state is RunState.CANCELING


def test_nothing_is_claimed_until_it_is_known_what_people_have_ordered() -> None:
    """The storage could not be read since the partition was assigned: it may well be paused."""
    world = World(records=5)
    member = world.member()
    member.fails.add(commands.ReadDirectives)
    member.feed(events.PartitionsAssigned((tp(0),)))
    heard(world, member)
    assert owned(member).phase is Phase.RESTORING
    assert "for orders to pause" in explain_partition(owned(member), world.now)
    assert len(member.given(commands.ReadDirectives)) >= 3, (
        "it is asked for often until it is known"
    )
    member.fails.clear()
    heard(world, member)
    assert member.engine.batch_requests


def test_what_was_read_before_the_assignment_is_not_enough() -> None:
    """Another member may have heard of an order since."""
    world = World(records=5, partitions=2)
    member = world.member(owns=1)
    member.fails.add(commands.ReadDirectives)
    member.feed(events.PartitionsAssigned((tp(1),)))
    heard(world, member)
    assert owned(member, 0).phase is Phase.OWNED
    assert owned(member, 1).phase is Phase.RESTORING


def test_a_read_that_fails_later_keeps_the_last_known_orders() -> None:
    """Neither does a paused partition go on, nor does the group stand still."""
    world = World(records=5, partitions=2)
    give(world, Action.PAUSE)
    member = world.member(owns=2, settings=_NOT_TOGETHER)
    member.fails.add(commands.ReadDirectives)
    world.wait(30.0, member)
    member.feed(events.TickArrived())
    world.wait(1.0, member)
    assert [batch_request.ranges for batch_request in member.engine.batch_requests] == [
        (span(1, 0, 5),)
    ]


def test_orders_are_read_every_few_seconds_and_not_without_partitions() -> None:
    """It costs a query each time."""
    world = World()
    member = world.member()
    world.wait(10.0, member)
    assert member.given(commands.ReadDirectives) == []
    member.feed(events.PartitionsAssigned((tp(0),)))
    world.wait(30.0, member)
    assert len(member.given(commands.ReadDirectives)) == 11


def test_a_range_whose_attempts_are_exhausted_is_not_tried_again_meanwhile() -> None:
    """What people mend must not be hit by a retry."""
    world = World(records=5)
    settings = EngineSettings(max_attempts=1)
    member = world.member(owns=1, settings=settings, pace=replace(settings.pace, first_s=5.0))
    member.pass_time()
    (run,) = member.tick()
    world.start(run)
    world.dagster.move(run, RunState.FAILED, has_started=True)
    heard(world, member)
    assert owned(member).phase is Phase.STOPPED
    give(world, Action.PAUSE)
    world.wait(20.0, member)
    assert member.tick() == []
    said = explain_partition(owned(member), world.now)
    assert "paused by ada" in said
    assert "stopped: run run1 failed" in said
    give(world, Action.RESUME)
    heard(world, member)
    assert len(member.tick()) == 1


def test_no_dead_letter_is_made_of_a_paused_partition() -> None:
    """Who pauses a partition wants to look at it."""
    world = World(records=5)
    member = world.member(owns=1, settings=EngineSettings(max_attempts=1, dead_letter_topic="dead"))
    member.pass_time()
    (run,) = member.tick()
    world.start(run)
    give(world, Action.PAUSE)
    heard(world, member)
    world.dagster.move(run, RunState.FAILED, has_started=True)
    heard(world, member)
    assert world.kafka.letters == []
    give(world, Action.RESUME)
    heard(world, member)
    (letter,) = world.kafka.letters
    assert world.kafka.offset(0) == 5
    asked = replace(owned(member), letter=None)
    assert not is_wanted(asked, letter)


def test_a_dead_letter_that_waits_for_its_error_is_dropped_when_the_partition_is_paused() -> None:
    """The error of the last run is looked up first, which may take long."""
    world = World(records=5)
    member = world.member(owns=1, settings=EngineSettings(max_attempts=1, dead_letter_topic="dead"))
    member.fails.add(commands.StoreDeadLetter)
    member.pass_time()
    (run,) = member.tick()
    world.start(run)
    world.dagster.move(run, RunState.FAILED, has_started=True)
    heard(world, member)
    letter = member.given(commands.StoreDeadLetter)[-1]
    assert isinstance(letter, commands.StoreDeadLetter)
    assert is_wanted(owned(member), letter)
    give(world, Action.PAUSE)
    heard(world, member)
    assert not is_wanted(owned(member), letter)


def test_an_explanation_says_who_paused_it_why_and_how_to_resume() -> None:
    """It is what the person on call reads first."""
    world = World(records=5, partitions=3)
    member = world.member(owns=3)
    give(world, Action.PAUSE, "orders:[01]")
    give(world, Action.STOP, "orders:2", by="bob")
    heard(world, member)
    assert explain_partition(owned(member), world.now).startswith(
        "orders-0: paused by ada since 2023-11-14 22:13:20 UTC: the warehouse is away; resume with "
        "`dagster-rebalance resume orders:0`; "
    )
    lines = summary(member.engine, world.now)
    assert (
        "orders-0, orders-1: paused by ada since 2023-11-14 22:13:20 UTC: the warehouse is away; "
        "resume with `dagster-rebalance resume 'orders:[01]'`" in lines
    )
    assert any(line.startswith("orders-2: stopped by bob since") for line in lines)


def test_changes_are_noted_once_for_all_partitions_of_an_order() -> None:
    """Notes are the log of a tick."""
    world = World(partitions=3)
    member = world.member(owns=3)
    give(world, Action.PAUSE, "orders")
    heard(world, member)
    give(world, Action.RESUME, "orders:1")
    heard(world, member)
    notes = [c.text for c in member.given(commands.Note) if isinstance(c, commands.Note)]
    assert "orders-0..2: paused by ada since 2023-11-14 22:13:20 UTC: the warehouse is away" in (
        notes
    )
    assert notes[-1] == "orders-1: resumed, and continues where it stopped"


def test_a_paused_partition_with_records_asks_no_more_often_than_an_idle_one() -> None:
    """A topic may be paused for a week."""
    world = World(records=5)
    settings = EngineSettings(look_s=0.25, idle_look_s=5.0, poll_s=0.5, lease_s=999.0)
    member = world.member(owns=1, settings=settings)
    member.pass_time()
    member.tick()
    give(world, Action.PAUSE)
    heard(world, member)
    world.wait(10.0, member)
    bounds, runs = len(member.given(commands.ReadBounds)), len(member.given(commands.ReadRuns))
    world.wait(60.0, member)
    assert len(member.given(commands.ReadBounds)) - bounds <= 13
    assert len(member.given(commands.ReadRuns)) - runs <= 7


# Streaming runs


def test_a_streaming_run_leaves_a_paused_partition_out_of_its_batches() -> None:
    """The others go on at full speed."""
    world = World(records=5, partitions=2)
    stream = Stream(world, "r1", owns=range(2))
    give(world, Action.PAUSE)
    stream.turn(4.0)
    stream.end()
    world.kafka.produce(tp(0), 5)
    world.kafka.produce(tp(1), 5)
    begun = stream.turn(4.0) or stream.turn(1.0)
    assert begun is not None
    assert begun.ranges == (span(1, 5, 10),)
    stream.end()
    give(world, Action.RESUME)
    begun = stream.turn(4.0) or stream.turn(1.0)
    assert begun is not None
    assert begun.ranges == (span(0, 0, 5),)


def test_the_batch_of_a_streaming_run_that_holds_a_stopped_partition_is_interrupted() -> None:
    """It is dropped, which is no attempt, and the other partitions go on at once."""
    world = World(records=5, partitions=2)
    stream = Stream(world, "r1", owns=range(2))
    assert stream.turn()
    give(world, Action.STOP)
    stream.turn(4.0)
    assert stream.interrupts == 1
    stream.end(Outcome.DROPPED)
    begun = stream.turn() or stream.turn()
    assert begun is not None
    assert begun.ranges == (span(1, 0, 5),)
    assert world.kafka.claims(1) == [(5, "s.r1.2.1")], "no attempt was counted"
    stream.turn(4.0)
    assert stream.interrupts == 1, "the batch at work has nothing of it"
    stream.end()
    give(world, Action.RESUME)
    begun = stream.turn(4.0) or stream.turn()
    assert begun is not None
    assert begun.ranges == (span(0, 0, 5),)


def test_a_claim_that_was_paused_before_it_was_begun_gets_another_batch_after_the_resume() -> None:
    """The rest of its batch was begun under the old id, and no id is begun twice."""
    world = World(records=5, partitions=2)
    stream = Stream(world, "r1", owns=range(2))
    stream.world.now += 0.25
    stream.pass_time()
    give(world, Action.PAUSE)
    world.now += 4.0
    stream.pass_time()
    begun = stream.turn()
    assert begun is not None
    assert (begun.batch_id, begun.ranges) == ("s.r1.1.1", (span(1, 0, 5),))
    stream.end()
    give(world, Action.RESUME)
    begun = stream.turn(4.0) or stream.turn() or stream.turn()
    assert begun is not None
    assert begun.ranges == (span(0, 0, 5),)
    assert begun.batch_id != "s.r1.1.1"


def test_claims_of_others_are_not_taken_over_while_they_are_paused() -> None:
    """A streaming run that takes a group over from a sensor."""
    world = World(records=5, partitions=2)
    world.member(owns=2).pass_time()
    give(world, Action.STOP, "orders")
    stream = Stream(world, "r1", owns=range(2))
    assert stream.turn(4.0) is None
    assert stream.turn(4.0) is None
    assert world.kafka.claims(0)[0][1].startswith("b")


def test_a_partition_that_is_given_back_while_it_is_taken_in_again_keeps_its_order() -> None:
    """Its order is newer than what was known of it before."""
    world = World(records=5)
    member = world.member(owns=1)
    member.pass_time()
    world.kafka.stored[tp(0)] = replace(world.kafka.stored[tp(0)], metadata="foreign")
    before = replace(owned(member), phase=Phase.OWNED)
    order = give(world, Action.STOP)
    taken_in = replace(before.under(order), phase=Phase.RESTORING, before=before)
    assert taken_in.asked_back().order == order


SLOW = RetryPace(600.0, 600.0)


def test_a_retry_ends_the_delay_of_a_range_that_failed() -> None:
    """A person has fixed the cause, and the next attempt was minutes away."""
    world = World(records=5)
    stream = Stream(world, "r1", owns=[0], pace=SLOW)
    stream.turn()
    stream.end(Outcome.FAILED)
    assert stream.turn(5.0) is None
    give(world, Action.RETRY, "orders:7")
    assert stream.turn(5.0) is None, "another partition"
    give(world, Action.RETRY)
    begun = stream.turn(4.0) or stream.turn()
    assert begun is not None
    assert begun.ranges == (span(0, 0, 5),)
    stream.end(Outcome.FAILED)
    for _ in range(3):
        assert stream.turn(5.0) is None, "a retry counts once"


def test_a_retry_tries_a_stopped_range_also_where_none_is_tried_again() -> None:
    """With a run for each batch; other partitions keep their delays."""
    world = World(records=5, partitions=2)
    pace = RetryPace(600.0, 600.0, retry_stopped=False)
    settings = replace(_NOT_TOGETHER, max_attempts=1, pace=pace)
    member = world.member(owns=2, settings=settings, pace=pace)
    member.pass_time()
    for run in member.tick():
        world.start(run)
        world.dagster.move(run, RunState.FAILED)
    heard(world, member)
    assert owned(member).phase is Phase.STOPPED
    assert not member.engine.batch_requests
    order = give(world, Action.RETRY)
    heard(world, member)
    assert [batch_request.ranges for batch_request in member.engine.batch_requests] == [
        (span(0, 0, 5),)
    ]
    assert any(note.endswith(f"orders-0: {order}") for note in notes(member))
    assert str(order) == "retried by ada at 2023-11-14 22:13:20 UTC: the warehouse is away"


def test_a_retry_leaves_paused_partitions_and_letters_alone() -> None:
    """Only a resume lets a partition go on; a record in the dead-letter topic is under way."""
    world = World(records=5)
    stream = Stream(world, "r1", owns=[0], pace=SLOW)
    stream.turn()
    stream.end(Outcome.FAILED)
    give(world, Action.PAUSE)
    give(world, Action.RETRY)
    assert stream.turn(4.0) is None
    assert stream.turn(4.0) is None
    assert owned(stream).order is not None
    (entry,) = owned(stream).entries
    assert entry.due_at == float("-inf"), "it is tried after the resume"

    exhausted = replace(entry, progress=Exhausted(("r1",)), due_at=9.0)
    assert entry.progress != exhausted.progress
    ledger = owned(stream).ledger
    assert ledger is not None
    book = replace(ledger, entries=(exhausted,))
    assert book.tried_now(exhausted_too=False).entries == (exhausted,)
    assert book.tried_now(exhausted_too=True).entries[0].due_at == float("-inf")


def test_a_retry_that_was_given_before_a_member_came_is_not_its() -> None:
    """Else each new member would repeat it, also on a range that kills its process."""
    world = World(records=5)
    first = Stream(world, "r1", owns=[0], pace=SLOW)
    first.turn()
    give(world, Action.RETRY)
    first.die()
    second = Stream(world, "r2", owns=[0], pace=SLOW)
    assert second.turn(4.0) is None
    assert second.turn(4.0) is None


def test_a_retry_looks_again_at_what_waits_for_a_person() -> None:
    """And asks Kafka again to store what it has refused."""
    world = World(records=5)
    world.kafka.stored[tp(0)] = OffsetAndMetadata(100)
    member = world.member(owns=1)
    world.wait(4.0, member)
    assert owned(member).phase is Phase.STOPPED
    give(world, Action.RETRY, "*")
    reads = len(member.given(commands.ReadStoredOffsets))
    world.wait(3.5, member)
    assert len(member.given(commands.ReadStoredOffsets)) > reads
    pending = PendingWrite(
        commands.OffsetWrite(tp(0), 1, None, OffsetAndMetadata(0)),
        5.0,
        again_at=7.0,
        refused="no right",
    )
    tried = replace(owned(member), pending=pending, ledger=None).tried_now(exhausted_too=True)
    assert tried.pending is not None
    assert tried.pending.last_asked_at == float("-inf")
