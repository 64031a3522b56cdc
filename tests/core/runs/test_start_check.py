"""A run refuses itself unless it alone may work."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import pytest

from dagster_rebalance.core.model.claims import Claim, StoredPartition, encode
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch
from dagster_rebalance.core.runs.start_check import refusal, rerun_refusal
from tests.core.world import span, tp

S = RunState
Stored: TypeAlias = dict[TopicPartition, OffsetAndMetadata | None]
ME = RunSnapshot("me", "b", (span(0, 10, 20), span(1, 0, 5)), S.STARTED)
CLAIMED: Stored = {
    tp(0): encode(StoredPartition(0, (Claim(10, "a"), Claim(20, "b")))),
    tp(1): encode(StoredPartition(0, (Claim(5, "b"),))),
}


def check(me: RunSnapshot = ME, *others: RunSnapshot, committed: Stored = CLAIMED) -> str | None:
    """The check of `me`, which is among the runs of its batch."""
    return refusal(me, [me, *others], committed)


def test_run_with_claims_and_no_rival_is_accepted() -> None:
    assert check() is None


@pytest.mark.parametrize("state", [state for state in RunState if state is not S.STARTED])
def test_run_that_is_not_started_is_refused(state: RunState) -> None:
    assert "another run could not see that it works" in (check(replace(ME, state=state)) or "")


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (None, "orders-1 [0, 5) is not claimed: the group has no committed offset"),
        (OffsetAndMetadata(0, "hello"), "not written by dagster_rebalance"),
        (OffsetAndMetadata(0), "is no longer claimed by batch b (the group is at 0)"),
        (encode(StoredPartition(0, (Claim(5, "c"),))), "is no longer claimed by batch b"),
        (encode(StoredPartition(0, (Claim(6, "b"),))), "is no longer claimed by batch b"),
        (OffsetAndMetadata(5), "orders-1 [0, 5) is already committed (the group is at 5)"),
    ],
)
def test_run_without_claim_for_every_range_is_refused(
    stored: OffsetAndMetadata | None, reason: str
) -> None:
    assert reason in (check(committed={**CLAIMED, tp(1): stored}) or "")


def test_refusal_names_remaining_ranges() -> None:
    text = check(committed={**CLAIMED, tp(1): OffsetAndMetadata(5)}) or ""
    assert text.endswith(
        "The rest of the batch, orders-0 [10, 20), is requested again by its owner"
    )
    assert "rest" not in (
        check(committed={tp(0): OffsetAndMetadata(20), tp(1): OffsetAndMetadata(5)}) or "rest"
    )


def test_run_for_unread_partition_is_refused() -> None:
    assert "has no committed offset" in (refusal(ME, [], {tp(0): CLAIMED[tp(0)]}) or "")


@pytest.mark.parametrize("state", [S.STARTED, S.CANCELING, S.SUCCEEDED])
def test_working_or_succeeded_run_of_batch_is_a_rival(
    state: RunState,
) -> None:
    """A tie-break by creation could let both work."""
    other = RunSnapshot("other", "b", (span(1, 0, 5),), state)
    assert check(ME, other) == f"run other of the same batch has {state.value} on orders-1 [0, 5)"


@pytest.mark.parametrize("state", [S.STARTED, S.CANCELING])
def test_working_run_of_another_batch_is_a_rival(
    state: RunState,
) -> None:
    """The claim of a run may be overwritten while it works."""
    other = RunSnapshot("other", "c", (span(1, 3, 9),), state)
    assert check(ME, other) == f"run other of batch c has {state.value} on orders-1 [0, 5)"


@pytest.mark.parametrize("state", [S.FAILED, S.CANCELED, S.DELETED])
def test_ended_run_that_may_still_work_is_a_rival(state: RunState) -> None:
    other = RunSnapshot("other", "b", (span(1, 0, 5),), state, is_over=False)
    assert "its process may still be working on orders-1 [0, 5)" in (check(ME, other) or "")


@pytest.mark.parametrize(
    "other",
    [
        RunSnapshot("other", "b", ME.ranges, S.WAITING),
        RunSnapshot("other", "b", ME.ranges, S.STARTING),
        RunSnapshot("other", "b", ME.ranges, S.FAILED),
        RunSnapshot("other", "b", ME.ranges, S.CANCELED),
        RunSnapshot("other", "b", ME.ranges, S.STARTED, is_refused=True),
        RunSnapshot("other", "b", ME.ranges, S.FAILED, is_refused=True, is_over=False),
        RunSnapshot("other", "c", ME.ranges, S.SUCCEEDED),
        RunSnapshot("other", "b", (span(2, 0, 5),), S.STARTED),
    ],
)
def test_run_not_working_on_ranges_is_no_rival(other: RunSnapshot) -> None:
    assert check(ME, other) is None


def test_two_rivals_are_both_refused() -> None:
    other = replace(ME, run_id="other")
    assert check(ME, other) is not None
    assert check(other, ME) is not None


def test_written_off_run_is_no_rival() -> None:
    rival = replace(ME, run_id="other", state=S.SUCCEEDED)
    assert "has succeeded" in (check(ME, rival) or "")
    assert check(ME, replace(rival, is_written_off=True)) is None


# Runs of a rerun

RERUN_ME = RunSnapshot("me", "r.abc.1", (span(0, 10, 20), span(1, 0, 5)), S.STARTED)
PLANNED = RerunBatch(Rerun("abc", "ada", "the fix", 1.0), 1, RERUN_ME.ranges)
COMMITTED: Stored = {tp(0): OffsetAndMetadata(20), tp(1): OffsetAndMetadata(7)}


def rerun_check(
    *others: RunSnapshot,
    me: RunSnapshot = RERUN_ME,
    committed: Stored = COMMITTED,
    planned: RerunBatch | None = PLANNED,
) -> str:
    """The check of a run of a rerun; empty when it may work."""
    return rerun_refusal(me, [me, *others], committed, planned) or ""


def test_rerun_of_committed_ranges_is_accepted() -> None:
    ahead = RunSnapshot("ahead", "b-1", (span(0, 20, 30),), S.STARTED)
    assert rerun_check(ahead) == ""


@pytest.mark.parametrize(
    "other",
    [
        RunSnapshot("other", "b-1", (span(0, 15, 30),), S.STARTED),
        RunSnapshot("other", "r.abc.1", (span(0, 10, 20),), S.STARTED),
        RunSnapshot("other", "r.abc.1", RERUN_ME.ranges, S.SUCCEEDED),
        RunSnapshot("other", "r.xyz.1", (span(1, 0, 5),), S.STARTED),
    ],
)
def test_rerun_with_rival_is_refused(other: RunSnapshot) -> None:
    assert "run other of " in rerun_check(other)
    # And the other way round: the group's own run does not begin beside one of a rerun.
    rival = RunSnapshot("rerun", "r.abc.1", (span(0, 15, 30),), S.STARTED)
    assert check(ME, rival) == "run rerun of batch r.abc.1 has started on orders-0 [10, 20)"


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (None, "the group has no committed offset, so it will process orders-0 [10, 20) itself"),
        (OffsetAndMetadata(19), "the group is at offset 19, so it will process orders-0 [10, 20)"),
    ],
)
def test_rerun_of_uncommitted_ranges_is_refused(
    stored: OffsetAndMetadata | None, said: str
) -> None:
    assert said in rerun_check(committed={**COMMITTED, tp(0): stored})


@pytest.mark.parametrize("planned", [None, replace(PLANNED, ranges=PLANNED.ranges[:1])])
def test_rerun_without_plan_is_refused(planned: RerunBatch | None) -> None:
    assert "no rerun includes these ranges" in rerun_check(planned=planned)
    assert "could not see" in rerun_check(me=replace(RERUN_ME, state=S.CANCELING))


def test_run_with_many_ranges_is_compared_only_with_runs_on_its_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many, compared = 200, 0
    real = OffsetRange.overlaps

    def overlaps(one: OffsetRange, other: OffsetRange) -> bool:
        nonlocal compared
        compared += 1
        return real(one, other)

    monkeypatch.setattr(OffsetRange, "overlaps", overlaps)
    me = RunSnapshot("me", "b", tuple(span(number, 0, 10) for number in range(many)), S.STARTED)
    other = RunSnapshot("r2", "c", tuple(span(number, 10, 20) for number in range(many)), S.STARTED)
    stored: Stored = {
        tp(number): encode(StoredPartition(0, (Claim(10, "b"),))) for number in range(many)
    }
    assert refusal(me, [me, other], stored) is None
    assert compared == many


def test_refusal_of_many_ranges_names_the_first_of_the_rest() -> None:
    me = RunSnapshot("me", "b", tuple(span(number, 0, 5) for number in range(9)), S.STARTED)
    stored: Stored = {
        tp(number): encode(StoredPartition(0, (Claim(5, "b"),))) for number in range(1, 9)
    }
    assert "orders-4 [0, 5), and 4 more, is requested again" in (refusal(me, [me], stored) or "")
