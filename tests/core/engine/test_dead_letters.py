"""Ranges whose attempts are exhausted go to the dead-letter topic.

When they go there, when not, and what comes before the commit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.batches.settings import EngineSettings, HoldBudget
from dagster_rebalance.core.engine.dead_letter_policy import is_wanted, why_stopped
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.offsets import Bounds, OffsetAndMetadata, OffsetRange
from dagster_rebalance.core.model.receipt import Outcome
from dagster_rebalance.core.model.run import RunState
from dagster_rebalance.core.partitions.ledger import OffsetLedger
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.progress import Exhausted
from tests.core.world import Member, World, span, tp

SETTINGS = EngineSettings(
    limits=BatchLimits(max_records_per_range=10),
    budget=HoldBudget(30, 5),
    max_attempts=2,
    dead_letter_topic="dead",
    lease_s=1000,
)
FIRST = span(0, 0, 10)


def fails(
    world: World,
    member: Member,
    end: RunState = RunState.FAILED,
    **marks: bool,
) -> str:
    """A run is started and fails; returns its id. What follows is not looked at yet."""
    (run_id,) = member.tick()
    assert world.start(run_id) is None
    world.wait(1, member)
    world.dagster.move(run_id, end, **marks)
    return run_id


def exhausted(world: World, member: Member) -> tuple[str, ...]:
    """As many runs fail as the settings allow, and Dagster's answer is in."""
    first = fails(world, member)
    world.wait(1, member)
    second = fails(world, member)
    world.wait(1, member)
    return first, second


def stage(
    *, answers: bool = True, records: int = 20, settings: EngineSettings = SETTINGS
) -> tuple[World, Member]:
    """A member with one partition; its letters are stored at once, or not answered."""
    world = World(records=records)
    member = world.member(owns=1, settings=settings)
    if not answers:
        member.unanswered.add(commands.StoreDeadLetter)
    return world, member


def letters(member: Member) -> list[commands.Command]:
    """The letters that were asked for."""
    return member.given(commands.StoreDeadLetter)


def test_a_range_that_fails_too_often_is_stored_then_committed_and_the_partition_goes_on() -> None:
    """The record comes first: a crash in between repeats it, and loses nothing."""
    world, member = stage()
    runs = exhausted(world, member)
    assert letters(member) == [commands.StoreDeadLetter(FIRST, 1, "b1", runs)]
    assert world.kafka.commits == [(tp(0), 10)]
    order = [
        type(c)
        for c in member.done
        if isinstance(
            c,
            commands.StoreDeadLetter
            | commands.WriteOffsets
            | commands.RecordCommit
            | commands.ReadRuns,
        )
    ]
    here = order.index(commands.StoreDeadLetter)
    assert order[here : here + 4] == [
        commands.StoreDeadLetter,
        commands.ReadRuns,
        commands.WriteOffsets,
        commands.RecordCommit,
    ]
    (record,) = world.dagster.recorded
    assert (record.range, record.is_dead_letter, record.run_id) == (FIRST, True, runs[-1])
    assert member.shown == []
    (run_id,) = member.tick()
    assert world.dagster.runs[run_id].ranges == (span(0, 10, 20),)


def test_nothing_is_committed_before_the_topic_has_the_record() -> None:
    """The answer is late, and the letter is asked for again meanwhile."""
    world, member = stage(answers=False)
    exhausted(world, member)
    world.wait(5, member)
    assert world.kafka.commits == []
    assert len(letters(member)) == 6
    (asked,) = set(letters(member))
    assert isinstance(asked, commands.StoreDeadLetter)
    member.feed(events.DeadLetterStored(asked))
    assert world.kafka.commits == [(tp(0), 10)]


def test_a_letter_is_wanted_until_it_is_stored_or_its_partition_must_be_given_up() -> None:
    """What the last run failed with is looked up before it is sent, and that may take long."""
    world, member = stage(answers=False)
    assert not is_wanted(
        member.engine.partitions.get(tp(0)), commands.StoreDeadLetter(FIRST, 1, "b1", ("r1", "r2"))
    )
    exhausted(world, member)
    (asked,) = letters(member)
    assert isinstance(asked, commands.StoreDeadLetter)
    assert is_wanted(member.engine.partitions[tp(0)], asked)
    assert not is_wanted(member.engine.partitions[tp(0)], replace(asked, range=span(0, 10, 20)))
    assert not is_wanted(replace(member.engine.partitions[tp(0)], phase=Phase.DRAINING), asked)
    assert not is_wanted(None, asked)
    member.fails.add(commands.ReadRuns)
    member.feed(events.DeadLetterStored(asked))
    assert not is_wanted(member.engine.partitions[tp(0)], asked)


def test_a_crash_between_record_and_commit_repeats_the_record_under_the_same_key() -> None:
    """At least once: the next owner cannot know that it is there."""
    world, member = stage()
    fails(world, member)
    world.wait(1, member)
    fails(world, member)
    member.fails.add(commands.WriteOffsets)
    world.wait(1, member)
    assert world.kafka.commits == []
    heir = world.member(owns=1, settings=SETTINGS)
    world.wait(1, heir)
    assert [letter.range.key for letter in world.kafka.letters] == ["orders-0-0-10"] * 2
    assert world.kafka.commits == [(tp(0), 10)]


def test_the_next_owner_records_a_dead_letter_that_was_only_committed() -> None:
    """The note beside the offset says what the commit was."""
    world, member = stage()
    member.fails.add(commands.RecordCommit)
    exhausted(world, member)
    assert world.dagster.recorded == []
    world.wait(1, world.member(owns=1, settings=SETTINGS))
    (record,) = world.dagster.recorded
    assert (record.range, record.is_dead_letter, record.is_late) == (FIRST, True, True)


def test_a_letter_that_cannot_be_stored_stops_the_partition_and_is_tried_again() -> None:
    """No silent stall, no busy loop; and it goes on by itself once the topic takes the record."""
    world, member = stage(answers=False)
    runs = exhausted(world, member)
    times = []
    (asked,) = letters(member)
    assert isinstance(asked, commands.StoreDeadLetter)
    for _ in range(9):
        member.feed(events.DeadLetterFailed(asked, "the topic is away; bring it back"))
        seen_before, since = len(letters(member)), world.now
        while len(letters(member)) == seen_before:
            world.wait(0.25, member)
        times.append(round(world.now - since))
    assert times == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    owned = member.engine.partitions[tp(0)]
    assert owned.phase is Phase.STOPPED
    assert owned.stop_reason == (
        f"orders-0: 2 runs failed on {FIRST}, the last one is {runs[-1]}, and the range could not "
        "be recorded in the dead-letter topic "
        "dead: the topic is away; bring it back. The member retries"
    )
    assert member.shown == [(tp(0), owned.stop_reason)]
    member.feed(events.DeadLetterFailed(asked, "the right to write is missing; grant it"))
    assert "grant it" in member.shown[-1][1]
    member.feed(events.DeadLetterStored(asked))
    assert world.kafka.commits == [(tp(0), 10)]
    assert member.shown[-1] == (tp(0), "")
    assert member.engine.partitions[tp(0)].phase is Phase.OWNED


@pytest.mark.parametrize("mark", ["is_refused", "is_taken_back", "is_interrupted"])
def test_runs_that_were_no_attempts_never_lead_to_a_letter(mark: str) -> None:
    """They say nothing about the records."""
    world, member = stage()
    for _ in range(5):
        fails(world, member, RunState.FAILED, **{mark: True})
        world.wait(1, member)
    assert letters(member) == []


def test_a_run_that_a_person_cancelled_stops_the_partition_instead() -> None:
    """A cancellation says nothing about the records: who cancels decides what becomes of them."""
    world, member = stage()
    fails(world, member)
    world.wait(1, member)
    run_id = fails(world, member, RunState.CANCELED)
    world.wait(5, member)
    assert letters(member) == []
    owned = member.engine.partitions[tp(0)]
    assert owned.phase is Phase.STOPPED
    assert f"2 runs failed on {FIRST}, the last one is {run_id}. One of" in owned.stop_reason


@pytest.mark.parametrize("dead_letter_topic", [None, SETTINGS.dead_letter_topic])
@pytest.mark.parametrize("bounds", [Bounds(5, 20), Bounds(0, 7)])
def test_offsets_that_kafka_has_not_are_never_dead_letters(
    bounds: Bounds, dead_letter_topic: str | None
) -> None:
    """The runs failed because nobody can read these offsets.

    Other stop reasons tell a person to execute a run again; here that cannot help.
    """
    world, member = stage(settings=replace(SETTINGS, dead_letter_topic=dead_letter_topic))
    first = fails(world, member)
    world.kafka.bounds[tp(0)] = bounds
    world.wait(2, member)
    fails(world, member)
    world.wait(2, member)
    assert first
    assert letters(member) == []
    owned = member.engine.partitions[tp(0)]
    assert owned.phase is Phase.STOPPED
    assert "dagster-rebalance reset orders:0" in owned.stop_reason
    assert world.kafka.commits == []


def test_a_range_behind_one_that_is_at_work_waits_for_its_turn() -> None:
    """In the order of the offsets, and no record long before its commit."""
    settings = replace(
        SETTINGS, max_attempts=1, limits=replace(SETTINGS.limits, max_claims_per_partition=2)
    )
    world, member = stage(settings=settings)
    (first,) = member.tick(state=RunState.STARTED)
    world.wait(1, member)
    (second,) = member.tick(state=RunState.STARTED)
    world.dagster.move(second, RunState.FAILED)
    world.wait(3, member)
    assert letters(member) == []
    assert member.engine.partitions[tp(0)].phase is Phase.OWNED
    world.succeed(first)
    world.wait(2, member)
    assert [(record.range, record.is_dead_letter) for record in world.dagster.recorded] == [
        (FIRST, False),
        (span(0, 10, 20), True),
    ]


def test_a_run_that_a_person_started_meanwhile_is_waited_for() -> None:
    """It is looked for once more before the commit."""
    world, member = stage(answers=False)
    exhausted(world, member)
    again = world.dagster.add("b1", (FIRST,))
    world.dagster.move(again, RunState.STARTED, parent_id="r1")
    (asked,) = set(letters(member))
    assert isinstance(asked, commands.StoreDeadLetter)
    member.feed(events.DeadLetterStored(asked))
    world.wait(5, member)
    assert world.kafka.commits == []
    world.succeed(again)
    world.wait(2, member)
    (record,) = world.dagster.recorded
    assert (record.run_id, record.is_dead_letter) == (again, False)
    notes = [
        command.text
        for command in member.done
        if isinstance(command, commands.Note) and "obsolete" in command.text
    ]
    assert notes == [
        (
            f"run {again} has succeeded on {FIRST} after all: the record with the key "
            "orders-0-0-10 in the dead-letter topic is obsolete"
        )
    ]
    assert member.engine.partitions[tp(0)].letter is None


def test_a_letter_that_cannot_be_stored_makes_no_look_at_runs_void() -> None:
    """A hundred failed letters must not make every look at the runs void.

    The member would never find that a run of the other partitions has ended.
    """
    world, member = stage(answers=False)
    exhausted(world, member)
    (asked,) = set(letters(member))
    assert isinstance(asked, commands.StoreDeadLetter)
    looks = {
        command.look
        for command in member.given(commands.ReadRuns)
        if isinstance(command, commands.ReadRuns)
    }
    member.feed(events.DeadLetterFailed(asked, "forbidden"))
    world.wait(2, member)
    assert {
        command.look
        for command in member.given(commands.ReadRuns)
        if isinstance(command, commands.ReadRuns)
    } == looks


def test_a_letter_is_not_asked_for_again_nor_a_stop_shown_on_once_it_is_stored() -> None:
    """Dagster is away, so that the runs cannot be looked at once more before the commit."""
    world, member = stage(answers=False)
    exhausted(world, member)
    (asked,) = set(letters(member))
    assert isinstance(asked, commands.StoreDeadLetter)
    member.feed(events.DeadLetterFailed(asked, "away"))
    assert member.shown[-1][1] != ""
    member.fails.add(commands.ReadRuns)
    member.feed(events.DeadLetterStored(asked))
    assert member.shown[-1] == (tp(0), "")
    asked_for = len(letters(member))
    world.wait(70, member)
    assert len(letters(member)) == asked_for
    assert world.kafka.commits == []


def test_that_a_letter_is_obsolete_is_said_once() -> None:
    """However long Kafka takes for the commit."""
    world, member = stage(answers=False)
    exhausted(world, member)
    again = world.dagster.add("b1", (FIRST,))
    world.dagster.move(again, RunState.STARTED, parent_id="r1")
    (asked,) = set(letters(member))
    assert isinstance(asked, commands.StoreDeadLetter)
    member.feed(events.DeadLetterStored(asked))
    member.fails.add(commands.WriteOffsets)
    world.succeed(again)
    world.wait(10, member)
    assert (
        len(
            [
                command
                for command in member.done
                if isinstance(command, commands.Note) and "obsolete" in command.text
            ]
        )
        == 1
    )


def test_a_run_that_a_person_started_meanwhile_and_that_fails_too_needs_no_second_letter() -> None:
    """The record is there."""
    world, member = stage(answers=False)
    exhausted(world, member)
    again = world.dagster.add("b1", (FIRST,))
    world.dagster.move(again, RunState.STARTED, parent_id="r1")
    (asked,) = set(letters(member))
    assert isinstance(asked, commands.StoreDeadLetter)
    member.feed(events.DeadLetterStored(asked))
    asked_for = len(letters(member))
    world.dagster.move(again, RunState.FAILED)
    world.wait(1, member)
    assert world.kafka.commits == [(tp(0), 10)]
    assert len(letters(member)) == asked_for


def test_a_hold_does_not_wait_for_a_letter() -> None:
    """The claim stays: the next owner stores it."""
    world, member = stage(answers=False)
    exhausted(world, member)
    asked_for = len(letters(member))
    member.feed(events.RevokeRequested((tp(0),)))
    world.wait(1, member)
    (receipt,) = member.receipts
    assert (receipt.outcome, receipt.handed_over) == (Outcome.NOTHING_TO_DO, (tp(0),))
    assert len(letters(member)) == asked_for
    world.wait(1, world.member(owns=1, settings=SETTINGS))
    assert world.kafka.commits == [(tp(0), 10)]


def test_no_letter_is_begun_while_a_partition_has_to_be_given_up() -> None:
    """The last run fails during the drain."""
    world, member = stage()
    fails(world, member)
    world.wait(1, member)
    (run_id,) = member.tick(state=RunState.STARTED)
    world.wait(1, member)
    member.feed(events.RevokeRequested((tp(0),)))
    world.dagster.move(run_id, RunState.FAILED)
    world.wait(1, member)
    assert letters(member) == []
    assert [receipt.handed_over for receipt in member.receipts] == [(tp(0),)]


def test_a_letter_that_is_stored_when_the_partition_is_asked_for_is_committed_in_the_drain() -> (
    None
):
    """It counts as done."""
    world, member = stage(answers=False)
    exhausted(world, member)
    (asked,) = set(letters(member))
    assert isinstance(asked, commands.StoreDeadLetter)
    member.fails.add(commands.ReadRuns)
    member.feed(events.DeadLetterStored(asked))
    member.feed(events.RevokeRequested((tp(0),)))
    assert world.released_by == []
    member.fails.clear()
    world.wait(1, member)
    (receipt,) = member.receipts
    assert (receipt.outcome, receipt.committed, receipt.handed_over) == (
        Outcome.DRAINED,
        {tp(0): 10},
        (),
    )


@pytest.mark.parametrize(
    "kind", [events.DeadLetterStored, lambda letter: events.DeadLetterFailed(letter, "away")]
)
@pytest.mark.parametrize("case", ["another epoch", "another range", "not asked for", "not owned"])
def test_a_late_answer_changes_nothing(kind: type[events.DeadLetterStored], case: str) -> None:
    """It may come seconds later, when the partition has gone and come back."""
    world, member = stage(answers=False)
    if case != "not asked for":
        exhausted(world, member)
    letter = commands.StoreDeadLetter(FIRST, 1, "b1", ("run1", "run2"))
    if case == "another epoch":
        letter = replace(letter, epoch=7)
    if case == "another range":
        letter = replace(letter, range=OffsetRange("orders", 0, 0, 9))
    if case == "not owned":
        member.feed(events.PartitionsLost((tp(0),)))
    before = dict(member.engine.partitions)
    member.feed(kind(letter))
    assert member.engine.partitions == before


def test_a_stored_letter_is_forgotten_when_somebody_moved_the_offset() -> None:
    """The partition is taken in anew: what was true of the range before need not be now."""
    world, member = stage(answers=False)
    exhausted(world, member)
    (asked,) = set(letters(member))
    assert isinstance(asked, commands.StoreDeadLetter)
    world.kafka.stored[tp(0)] = OffsetAndMetadata(15)
    member.feed(events.DeadLetterStored(asked))
    assert member.engine.partitions[tp(0)].letter is None
    world.wait(2, member)
    assert world.kafka.offset(0) == 15


def test_a_partition_of_which_no_bounds_are_known_is_judged_by_its_runs() -> None:
    """Bounds come later than claims only in a test; still nothing may be made up from them."""
    ledger = OffsetLedger(tp(0), 1, 0).claim("b1", 10).note(1, FIRST, Exhausted(("r1",)))
    owned = OwnedPartition(tp(0), 1, Phase.OWNED, ledger=ledger)
    assert why_stopped(owned, "dead") is None
    assert why_stopped(owned, None) is not None
