"""The ledger commits in order, whatever the order of success."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.partitions.ledger import OffsetLedger
from dagster_rebalance.core.runs.progress import (
    DeadLettered,
    Exhausted,
    InFlight,
    Succeeded,
    ToRequest,
)
from tests.core.world import span, tp

if TYPE_CHECKING:
    from dagster_rebalance.core.runs.progress import Progress

EPOCH = 7


def ledger(*untils: int) -> OffsetLedger:
    """A ledger at offset 0 with claims that end at `untils`, of batches b0, b1 ..."""
    result = OffsetLedger(tp(0), EPOCH, 0)
    for number, until in enumerate(untils):
        result = result.with_claim(f"b{number}", until, claimed_at=5.0)
    return result


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_commits_follow_offset_order(lengths: list[int], random: object) -> None:
    untils = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    book = ledger(*untils)
    order = list(book.entries)
    random.shuffle(order)  # type: ignore[attr-defined]
    succeeded: set[int] = set()
    for entry in order:
        book = book.with_progress(EPOCH, entry.range, Succeeded("r"))
        succeeded.add(entry.range.start)
        while (due := book.committable) is not None:
            assert due.range.start == book.next_offset
            assert due.range.start in succeeded
            book = book.after_commit(due)
    assert book.next_offset == untils[-1]
    assert not book.entries


def test_range_finished_out_of_order_waits_for_previous() -> None:
    book = ledger(10, 20).with_progress(EPOCH, span(0, 10, 20), Succeeded("r2"))
    assert book.committable is None
    late = book.entries[1]
    with pytest.raises(IllegalStateError, match=r"\[10, 20\) cannot be committed at offset 0"):
        book.after_commit(late)


def test_commit_of_unfinished_range_raises() -> None:
    book = ledger(10)
    with pytest.raises(IllegalStateError, match="is not done"):
        book.after_commit(book.entries[0])


def test_progress_of_another_epoch_is_ignored() -> None:
    book = ledger(10)
    assert book.with_progress(EPOCH - 1, span(0, 0, 10), Succeeded("old")) == book


def test_progress_after_success_is_ignored() -> None:
    book = ledger(10).with_progress(EPOCH, span(0, 0, 10), Succeeded("r1"))
    assert book.with_progress(EPOCH, span(0, 0, 10), ToRequest(3)) == book


def test_progress_of_another_range_is_ignored() -> None:
    book = ledger(10)
    assert book.with_progress(EPOCH, span(0, 0, 9), Succeeded("r1")) == book


def test_ledger_has_live_and_unstarted_runs() -> None:
    book = ledger(10, 20).with_progress(
        EPOCH, span(0, 0, 10), InFlight(("r1", "r2", "r3"), ("r2",), ("r1",))
    )
    assert book.live_runs == {"r1", "r2", "r3"}
    assert book.unstarted_runs == {"r2", "r1"}


@pytest.mark.parametrize(
    ("progress", "after"),
    [
        (ToRequest(4, failures=2), ToRequest(3, failures=2)),
        (Exhausted(("r1", "r2"), attempt=9), Exhausted(("r1", "r2"), attempt=3)),
        (InFlight(("r7",)), InFlight(("r7",))),
    ],
)
def test_reclaimed_range_numbers_attempts_by_failures(progress: Progress, after: Progress) -> None:
    book = (
        OffsetLedger(tp(0), EPOCH, 0)
        .with_claim("b0", 10)
        .with_progress(EPOCH, span(0, 0, 10), progress)
    )
    (entry,) = book.with_reassigned(span(0, 0, 10), "s.r1.1.3", 5.0).entries
    assert (entry.progress, entry.batch_id, entry.claimed_at) == (after, "s.r1.1.3", 5.0)
    assert entry.previous_batch_id == book.entries[0].batch_id


def test_range_is_not_reassigned_before_the_runs_of_its_former_batch_are_read() -> None:
    book = (
        OffsetLedger(tp(0), EPOCH, 0)
        .with_claim("b0", 10)
        .with_reassigned(span(0, 0, 10), "s.r1.1.1", 5.0)
    )
    with pytest.raises(IllegalStateError, match=r"orders-0 \[0, 10\).* runs of b0 may still"):
        book.with_reassigned(span(0, 0, 10), "s.r1.2.2", 6.0)
    (entry,) = (
        book.with_completed_reassignment(span(0, 0, 10), ToRequest())
        .with_reassigned(span(0, 0, 10), "s.r1.2.2", 6.0)
        .entries
    )
    assert (entry.batch_id, entry.previous_batch_id) == ("s.r1.2.2", ""), "its own run has ended"


def test_done_range_keeps_its_former_batch() -> None:
    book = OffsetLedger(tp(0), EPOCH, 0).with_claim("s.r1.1.1", 10, previous_batch_id="b1")
    assert (
        book.with_completed_reassignment(span(0, 0, 10), ToRequest()).entries[0].previous_batch_id
        == ""
    )
    done = book.with_progress(EPOCH, span(0, 0, 10), Succeeded("run1"))
    assert done.with_completed_reassignment(span(0, 0, 10), ToRequest()) == done


def test_blocked_is_first_exhausted_range() -> None:
    assert ledger(10).blocked is None
    book = ledger(10, 20).with_progress(EPOCH, span(0, 10, 20), Exhausted(("r7", "r8", "r9")))
    assert book.blocked == (book.entries[1], Exhausted(("r7", "r8", "r9")))


def test_dead_lettered_range_stays_done() -> None:
    book = ledger(10).with_progress(EPOCH, span(0, 0, 10), DeadLettered("r3"))
    assert book.with_progress(EPOCH, span(0, 0, 10), InFlight(("r4",))) == book
    (entry,) = book.entries
    assert (book.committable, entry.completed_by, entry.is_dead_letter) == (entry, "r3", True)
    assert book.after_commit(entry).next_offset == 10


def test_new_claim_starts_at_end_of_last_claim() -> None:
    assert ledger().claimed_until == 0
    assert ledger(10, 25).claimed_until == 25
    assert ledger(10, 25).entries[1].range == span(0, 10, 25)
