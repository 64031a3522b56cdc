"""Dead letters: failed ranges go to the dead-letter topic, and their partition continues."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings, HoldBudget
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.engine.dead_letter_policy import is_wanted, why_stopped
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.partitions.ledger import OffsetLedger
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.progress import Exhausted
from tests.core.story import Script, play
from tests.core.world import span, tp
from tests.story import stories

BASE = EngineSettings(
    limits=BatchLimits(max_records_per_range=10),
    budget=HoldBudget(30, 5),
    max_attempts=2,
    dead_letter_topic="dead",
    lease_s=1000,
)
TWO_CLAIMS = replace(BASE.limits, max_claims_per_partition=2)
SETTINGS = {
    "BASE": BASE,
    "NO_TOPIC": replace(BASE, dead_letter_topic=None),
    "ONE_ATTEMPT": replace(BASE, max_attempts=1, limits=TWO_CLAIMS),
}
FIRST = span(0, 0, 10)
JOIN = "world 20 | join m 1 BASE"
FAIL = "tick | start run1 | wait 1 | run run1 FAILED"
EXHAUST = f"{FAIL} | wait 1 | tick | start run2 | wait 1 | run run2 FAILED"
UNANSWERED = f"{JOIN} | unanswered StoreDeadLetter | {EXHAUST} | wait 1"
RE_EXECUTE = "add b1 0 0 10"

STORIES = f"""
## exhausted_range_is_stored_then_committed_and_the_partition_continues
{JOIN} | {EXHAUST} | wait 1
letters = orders-0-0-10 | commits = 0:10 | recorded = 0[0,10) run2 dead | shown = none
tick | made = run3 | ranges run3 = 0[10,20)

## letter_is_requested_again_and_nothing_committed_until_it_is_stored
{UNANSWERED} | wait 5
commits = none | given StoreDeadLetter = 6
stored_letter
commits = 0:10

## crash_between_letter_and_commit_repeats_the_letter_with_the_same_key
{JOIN} | {EXHAUST} | fails WriteOffsets | wait 1
commits = none
join heir 1 BASE | wait 1
letters = orders-0-0-10, orders-0-0-10 | commits = 0:10

## next_owner_records_a_dead_letter_that_was_only_committed
{JOIN} | fails RecordCommits | {EXHAUST} | wait 1
recorded = none
join heir 1 BASE | wait 1
recorded = 0[0,10) run2 late dead

## run_that_an_operator_cancelled_stops_the_partition_instead
{JOIN} | {FAIL} | wait 1 | tick | start run2 | wait 1 | run run2 CANCELED | wait 5
letters = none | phase = STOPPED
reason ~ 2 runs failed on orders-0 [0, 10), the last one is run2. A user

## range_behind_a_running_one_waits_for_its_turn
world 20 | join m 1 ONE_ATTEMPT | tick STARTED | wait 1 | tick STARTED | run run2 FAILED | wait 3
letters = none | phase = OWNED
succeed run1 | wait 2
recorded = 0[0,10) run1, 0[10,20) run2 dead

## re_executed_run_is_waited_for_before_the_commit
{UNANSWERED} | {RE_EXECUTE} | stored_letter | wait 5
commits = none
succeed run3 | wait 2
recorded = 0[0,10) run3
log ~ run run3 has succeeded on orders-0 [0, 10) after all: the record with the key orders-0-0-10

## re_executed_run_that_fails_needs_no_second_letter
{UNANSWERED} | {RE_EXECUTE} | stored_letter | mark StoreDeadLetter | run run3 FAILED | wait 1
commits = 0:10 | given StoreDeadLetter = 0

## stored_letter_is_not_requested_again_and_clears_the_stop
# Dagster is down, so the runs cannot be read again before the commit.
{UNANSWERED} | failed_letter away
shown = 0 stopped
fails ReadRuns | stored_letter
shown = 0 stopped, 0 resumed
mark StoreDeadLetter | wait 70
given StoreDeadLetter = 0 | commits = none

## hold_does_not_wait_for_a_letter
{UNANSWERED} | mark StoreDeadLetter | revoke 0 | wait 1
outcomes = revoke nothing to do | receipt handed_over = 0 | given StoreDeadLetter = 0
join heir 1 BASE | wait 1
commits = 0:10

## letter_is_not_begun_while_its_partition_drains
{JOIN} | {FAIL} | wait 1 | tick STARTED | wait 1 | revoke 0 | run run2 FAILED | wait 1
letters = none | receipt handed_over = 0

## stored_letter_is_committed_while_its_partition_drains
{UNANSWERED} | fails ReadRuns | stored_letter | revoke 0
released = none
answers | wait 1
outcomes = revoke drained | receipt committed = 0:10 | receipt handed_over = none

## stored_letter_is_dropped_after_the_offset_was_moved
{UNANSWERED} | stored 0 15 | stored_letter
letter = False
wait 2
offset 0 = 15
"""


@stories(STORIES)
def test_dead_letter(story: str) -> None:
    play(story, SETTINGS)


def exhausted() -> Script:
    """A member whose first range is exhausted, and whose letter is not answered."""
    return play(UNANSWERED, SETTINGS)


def test_letter_names_the_failed_runs_and_comes_before_the_commit() -> None:
    script = play(f"{JOIN} | {EXHAUST} | wait 1", SETTINGS)
    member = script.member
    assert member.given(commands.StoreDeadLetter) == [
        commands.StoreDeadLetter(FIRST, 1, "b1", ("run1", "run2"))
    ]
    kinds = ("StoreDeadLetter", "ReadRuns", "WriteOffsets", "RecordCommits")
    order = script.is_order("99", *kinds)
    assert order[order.index("StoreDeadLetter") :].startswith(" ".join(kinds))


def test_letter_is_requested_until_it_is_stored_or_its_partition_drains() -> None:
    """The error of the last run is read before the letter is sent, which may take long."""
    letter = commands.StoreDeadLetter(FIRST, 1, "b1", ("run1", "run2"))
    assert not is_wanted(play(JOIN, SETTINGS).owned(), letter)
    script = exhausted()
    assert is_wanted(script.owned(), letter)
    assert not is_wanted(script.owned(), replace(letter, range=span(0, 10, 20)))
    assert not is_wanted(script.owned()._replace(phase=Phase.DRAINING), letter)
    assert not is_wanted(None, letter)
    script.play("fails ReadRuns | stored_letter")
    assert not is_wanted(script.owned(), letter)


def test_failed_letter_stops_the_partition_and_is_retried_at_growing_intervals() -> None:
    script = exhausted()
    intervals_s = []
    for _ in range(9):
        script.play('failed_letter "the topic is away; bring it back" | mark StoreDeadLetter')
        since = script.world.now
        while script.is_given("StoreDeadLetter") == 0:
            script.do_wait("0.25")
        intervals_s.append(round(script.world.now - since))
    assert intervals_s == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert script.is_reason() == (
        f"orders-0: 2 runs failed on {FIRST}, the last one is run2, and the range could not be "
        "recorded in the dead-letter topic dead: the topic is away; bring it back. The member "
        "retries"
    )
    script.play("""
        phase = STOPPED | shown = 0 stopped
        failed_letter "the right to write is missing; grant it"
        reason ~ grant it | shown = 0 stopped, 0 stopped
        stored_letter
        commits = 0:10 | shown = 0 stopped, 0 stopped, 0 resumed | phase = OWNED
    """)


@pytest.mark.parametrize("mark", ["is_refused", "is_cancelled_by_member", "is_interrupted"])
def test_run_that_was_no_attempt_never_leads_to_a_letter(mark: str) -> None:
    script = play(JOIN, SETTINGS)
    for number in range(1, 6):
        script.play(f"tick | start run{number} | wait 1 | run run{number} FAILED {mark}=1 | wait 1")
    script.play("letters = none")


@pytest.mark.parametrize("settings", ["BASE", "NO_TOPIC"])
@pytest.mark.parametrize("bounds", ["5 20", "0 7"])
def test_offsets_that_kafka_does_not_have_are_never_dead_letters(
    bounds: str, settings: str
) -> None:
    """A re-execution cannot help either, so the reason names a reset."""
    script = play(f"world 20 | join m 1 {settings} | {FAIL} | bounds 0 {bounds} | wait 2", SETTINGS)
    script.play("""
        tick | start run2 | wait 1 | run run2 FAILED | wait 2
        letters = none | phase = STOPPED | commits = none
        reason ~ dagster-rebalance reset orders:0
    """)


def test_failed_letter_makes_no_read_of_runs_stale() -> None:
    script = exhausted()

    def looks() -> set[int]:
        reads = script.member.given(commands.ReadRuns)
        return {read.sequence for read in reads if isinstance(read, commands.ReadRuns)}

    before = looks()
    script.play("failed_letter forbidden | wait 2")
    assert looks() == before


def test_obsolete_letter_is_noted_once() -> None:
    script = exhausted().play(f"{RE_EXECUTE} | stored_letter | fails WriteOffsets | succeed run3")
    script.do_wait("10")
    assert script.is_log().count("with the key orders-0-0-10 in the dead-letter topic is obs") == 1
    script.play("answers | wait 2 | letter = False")


@pytest.mark.parametrize("answer", ["stored", "failed"])
@pytest.mark.parametrize("case", ["another epoch", "another range", "not requested", "not owned"])
def test_late_answer_changes_nothing(answer: str, case: str) -> None:
    """It may come seconds later, when the partition was lost and assigned again."""
    script = play(JOIN, SETTINGS) if case == "not requested" else exhausted()
    letter = commands.StoreDeadLetter(FIRST, 1, "b1", ("run1", "run2"))
    if case == "another epoch":
        letter = replace(letter, epoch=7)
    if case == "another range":
        letter = replace(letter, range=span(0, 0, 9))
    if case == "not owned":
        script.do_lose("0")
    before = dict(script.member.engine.partitions)
    stored, failed = events.DeadLetterStored(letter), events.DeadLetterFailed(letter, "away")
    script.member.feed(stored if answer == "stored" else failed)
    assert script.member.engine.partitions == before


def test_partition_without_known_bounds_is_judged_by_its_runs() -> None:
    ledger = (
        OffsetLedger(tp(0), 1, 0).with_claim("b1", 10).with_progress(1, FIRST, Exhausted(("r1",)))
    )
    owned = OwnedPartition(tp(0), 1, Phase.OWNED, ledger=ledger)
    assert why_stopped(owned, EngineSettings(dead_letter_topic="dead")) is None
    assert why_stopped(owned, EngineSettings()) is not None
