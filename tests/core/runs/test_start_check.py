"""A run refuses itself unless it alone may work."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import pytest

from dagster_rebalance.core.model.claims import Claim, StoredPartition, encode
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.core.model.run import RunSeen, RunState
from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch
from dagster_rebalance.core.runs.start_check import refusal, rerun_refusal
from tests.core.world import span, tp

S = RunState
Stored: TypeAlias = dict[TopicPartition, OffsetAndMetadata | None]
ME = RunSeen("me", "b", (span(0, 10, 20), span(1, 0, 5)), S.STARTED)
CLAIMED: Stored = {
    tp(0): encode(StoredPartition(0, (Claim(10, "a"), Claim(20, "b")))),
    tp(1): encode(StoredPartition(0, (Claim(5, "b"),))),
}


def check(me: RunSeen = ME, *others: RunSeen, committed: Stored = CLAIMED) -> str | None:
    """The check of `me`, which is among the runs of its batch."""
    return refusal(me, [me, *others], committed)


def test_a_run_with_all_its_claims_and_no_rival_works() -> None:
    """The normal case; the run itself is among the runs of the batch."""
    assert check() is None


@pytest.mark.parametrize("state", [state for state in RunState if state is not S.STARTED])
def test_a_run_whose_start_is_not_visible_refuses_itself(state: RunState) -> None:
    """Else two runs could each look before the other can be seen."""
    assert "another run could not see that it works" in (check(replace(ME, state=state)) or "")


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (None, "orders-1 [0, 5) is not claimed: the group has no committed offset"),
        (OffsetAndMetadata(0, "hello"), "not written by dagster_rebalance"),
        (OffsetAndMetadata(0), "is not claimed by batch b any more (the group is at 0)"),
        (encode(StoredPartition(0, (Claim(5, "c"),))), "is not claimed by batch b any more"),
        (encode(StoredPartition(0, (Claim(6, "b"),))), "is not claimed by batch b any more"),
        (OffsetAndMetadata(5), "orders-1 [0, 5) is committed already (the group is at 5)"),
    ],
)
def test_a_run_without_a_standing_claim_for_every_range_refuses_itself(
    stored: OffsetAndMetadata | None, reason: str
) -> None:
    """A run of a zombie, or one that was launched late from an interrupted tick."""
    assert reason in (check(committed={**CLAIMED, tp(1): stored}) or "")


def test_a_run_of_which_a_part_is_gone_says_what_becomes_of_the_rest() -> None:
    """A person cannot execute the rest alone: it is requested again."""
    text = check(committed={**CLAIMED, tp(1): OffsetAndMetadata(5)}) or ""
    assert text.endswith(
        "The rest of the batch, orders-0 [10, 20), is requested again by its owner"
    )
    assert "rest" not in (
        check(committed={tp(0): OffsetAndMetadata(20), tp(1): OffsetAndMetadata(5)}) or "rest"
    )


def test_a_run_for_a_partition_that_was_not_read_refuses_itself() -> None:
    """What is unknown is not claimed."""
    assert "has no committed offset" in (refusal(ME, [], {tp(0): CLAIMED[tp(0)]}) or "")


@pytest.mark.parametrize("state", [S.STARTED, S.CANCELING, S.SUCCEEDED])
def test_any_other_run_that_works_or_has_worked_on_a_shared_range_is_a_reason(
    state: RunState,
) -> None:
    """Whichever was created first: with a tie-break both could work."""
    other = RunSeen("other", "b", (span(1, 0, 5),), state)
    assert check(ME, other) == f"run other of the same batch has {state.value} on orders-1 [0, 5)"


@pytest.mark.parametrize("state", [S.STARTED, S.CANCELING])
def test_a_run_of_another_batch_that_works_on_a_part_of_the_ranges_is_a_reason(
    state: RunState,
) -> None:
    """The claim of a run may be overwritten while the run works.

    A member that read before it was superseded did it, or a person who moved the offset.
    """
    other = RunSeen("other", "c", (span(1, 3, 9),), state)
    assert check(ME, other) == f"run other of batch c has {state.value} on orders-1 [0, 5)"


@pytest.mark.parametrize("state", [S.FAILED, S.CANCELED, S.DELETED])
def test_a_run_that_may_work_although_dagster_shows_its_end_is_a_reason(state: RunState) -> None:
    """A retry that Dagster, or a person, begins at once must not have company."""
    other = RunSeen("other", "b", (span(1, 0, 5),), state, is_over=False)
    assert "it is not known that its process does no more work on orders-1 [0, 5)" in (
        check(ME, other) or ""
    )


@pytest.mark.parametrize(
    "other",
    [
        RunSeen("other", "b", ME.ranges, S.WAITING),
        RunSeen("other", "b", ME.ranges, S.STARTING),
        RunSeen("other", "b", ME.ranges, S.FAILED),
        RunSeen("other", "b", ME.ranges, S.CANCELED),
        RunSeen("other", "b", ME.ranges, S.STARTED, is_refused=True),
        RunSeen("other", "b", ME.ranges, S.FAILED, is_refused=True, is_over=False),
        RunSeen("other", "c", ME.ranges, S.SUCCEEDED),
        RunSeen("other", "b", (span(2, 0, 5),), S.STARTED),
    ],
)
def test_a_run_that_does_not_work_on_the_same_ranges_is_no_reason(other: RunSeen) -> None:
    """A waiting run finds this one when it starts.

    A run of another part of the batch has ranges of its own.
    """
    assert check(ME, other) is None


def test_two_runs_that_see_each_other_both_refuse() -> None:
    """No output at all is safe: the owner asks again. Two outputs would not be."""
    other = replace(ME, run_id="other")
    assert check(ME, other) is not None
    assert check(other, ME) is not None


def test_a_run_that_was_written_off_keeps_nobody_from_working() -> None:
    """Its success does not count, so the range has to be done again."""
    rival = replace(ME, run_id="other", state=S.SUCCEEDED)
    assert "has succeeded" in (check(ME, rival) or "")
    assert check(ME, replace(rival, is_written_off=True)) is None


# Runs of a rerun

RERUN_ME = RunSeen("me", "r.abc.1", (span(0, 10, 20), span(1, 0, 5)), S.STARTED)
PLANNED = RerunBatch(Rerun("abc", "ada", "the fix", 1.0), 1, RERUN_ME.ranges)
COMMITTED: Stored = {tp(0): OffsetAndMetadata(20), tp(1): OffsetAndMetadata(7)}


def rerun_check(
    *others: RunSeen,
    me: RunSeen = RERUN_ME,
    committed: Stored = COMMITTED,
    planned: RerunBatch | None = PLANNED,
) -> str:
    """The check of a run of a rerun; empty when it may work."""
    return rerun_refusal(me, [me, *others], committed, planned) or ""


def test_a_run_of_a_rerun_works_on_what_the_group_has_committed() -> None:
    """Beside a run of the group that works further ahead."""
    ahead = RunSeen("ahead", "b-1", (span(0, 20, 30),), S.STARTED)
    assert rerun_check(ahead) == ""


@pytest.mark.parametrize(
    "other",
    [
        RunSeen("other", "b-1", (span(0, 15, 30),), S.STARTED),
        RunSeen("other", "r.abc.1", (span(0, 10, 20),), S.STARTED),
        RunSeen("other", "r.abc.1", RERUN_ME.ranges, S.SUCCEEDED),
        RunSeen("other", "r.xyz.1", (span(1, 0, 5),), S.STARTED),
    ],
)
def test_a_run_of_a_rerun_works_alone(other: RunSeen) -> None:
    """A run of the group, of its own batch, or of another rerun has a range of it."""
    assert "run other of " in rerun_check(other)
    # And the other way round: the group's own run does not begin beside one of a rerun.
    rival = RunSeen("rerun", "r.abc.1", (span(0, 15, 30),), S.STARTED)
    assert check(ME, rival) == "run rerun of batch r.abc.1 has started on orders-0 [10, 20)"


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (None, "the group has no committed offset, so it will process orders-0 [10, 20) itself"),
        (OffsetAndMetadata(19), "the group is at offset 19, so it will process orders-0 [10, 20)"),
    ],
)
def test_a_run_of_a_rerun_leaves_alone_what_the_group_will_process(
    stored: OffsetAndMetadata | None, said: str
) -> None:
    """Somebody has moved the committed offset back since the rerun was asked for."""
    assert said in rerun_check(committed={**COMMITTED, tp(0): stored})


@pytest.mark.parametrize("planned", [None, replace(PLANNED, ranges=PLANNED.ranges[:1])])
def test_only_what_a_person_has_asked_for_is_processed_again(planned: RerunBatch | None) -> None:
    """A cancelled rerun, a run that is executed again after all, or a config of one's own."""
    assert "no rerun is to process these ranges" in rerun_check(planned=planned)
    assert "could not see" in rerun_check(me=replace(RERUN_ME, state=S.CANCELING))
