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
        result = result.claim(f"b{number}", until, claimed_at=5.0)
    return result


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_commit_never_skips_an_offset(lengths: list[int], random: object) -> None:
    """Whatever finishes first, commits follow the order of the offsets and leave nothing out."""
    untils = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    book = ledger(*untils)
    order = list(book.entries)
    random.shuffle(order)  # type: ignore[attr-defined]
    succeeded: set[int] = set()
    for entry in order:
        book = book.note(EPOCH, entry.range, Succeeded("r"))
        succeeded.add(entry.range.start)
        while (due := book.committable) is not None:
            assert due.range.start == book.next_offset
            assert due.range.start in succeeded
            book = book.committed(due)
    assert book.next_offset == untils[-1]
    assert not book.entries


def test_a_range_that_finished_out_of_order_waits_for_the_one_before_it() -> None:
    """A commit at 20 would say that [0, 10) is done."""
    book = ledger(10, 20).note(EPOCH, span(0, 10, 20), Succeeded("r2"))
    assert book.committable is None
    late = book.entries[1]
    with pytest.raises(IllegalStateError, match=r"\[10, 20\) cannot be committed at offset 0"):
        book.committed(late)


def test_only_what_succeeded_is_committed() -> None:
    """The first range, while its run works."""
    book = ledger(10)
    with pytest.raises(IllegalStateError, match="is not done"):
        book.committed(book.entries[0])


def test_news_from_another_epoch_changes_nothing() -> None:
    """A completion of an earlier ownership of the same offsets must not count for this one."""
    book = ledger(10)
    assert book.note(EPOCH - 1, span(0, 0, 10), Succeeded("old")) == book


def test_news_after_a_success_changes_nothing() -> None:
    """A later run of the same batch cannot undo a success that may be committed already."""
    book = ledger(10).note(EPOCH, span(0, 0, 10), Succeeded("r1"))
    assert book.note(EPOCH, span(0, 0, 10), ToRequest(3)) == book


def test_news_of_another_range_changes_nothing() -> None:
    """Bounds never change once they are claimed."""
    book = ledger(10)
    assert book.note(EPOCH, span(0, 0, 9), Succeeded("r1")) == book


def test_the_ledger_knows_its_live_runs_and_those_that_have_not_started() -> None:
    """What a drain waits for, and what it can cancel at no cost."""
    book = ledger(10, 20).note(
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
def test_a_claim_that_changes_hands_counts_its_attempts_by_failures(
    progress: Progress, after: Progress
) -> None:
    """The next run is one above those that failed; one that was heard of meanwhile stays."""
    book = OffsetLedger(tp(0), EPOCH, 0).claim("b0", 10).note(EPOCH, span(0, 0, 10), progress)
    (entry,) = book.claimed_again(span(0, 0, 10), "s.r1.1.3", 5.0).entries
    assert (entry.progress, entry.batch_id, entry.claimed_at) == (after, "s.r1.1.3", 5.0)
    assert entry.taken_from == book.entries[0].batch_id
    assert entry.given_to("s.r1.2.4", 6.0).taken_from == "", "the own one before it is over"


def test_a_range_that_is_done_keeps_the_batch_that_it_was_taken_from() -> None:
    """If its commit fails, the next owner must still find the run of that batch."""
    book = OffsetLedger(tp(0), EPOCH, 0).claim("s.r1.1.1", 10, taken_from="b1")
    assert book.taken(span(0, 0, 10), ToRequest()).entries[0].taken_from == ""
    done = book.note(EPOCH, span(0, 0, 10), Succeeded("run1"))
    assert done.taken(span(0, 0, 10), ToRequest()) == done


def test_the_first_range_that_is_exhausted_is_named() -> None:
    """It is what stops the partition."""
    assert ledger(10).blocked is None
    book = ledger(10, 20).note(EPOCH, span(0, 10, 20), Exhausted(("r7", "r8", "r9")))
    assert book.blocked == (book.entries[1], Exhausted(("r7", "r8", "r9")))


def test_a_range_in_the_dead_letter_topic_is_done_and_stays_so() -> None:
    """The commit of the dead letter may be under way.

    News of a run that started too late must not change what that commit means.
    """
    book = ledger(10).note(EPOCH, span(0, 0, 10), DeadLettered("r3"))
    assert book.note(EPOCH, span(0, 0, 10), InFlight(("r4",))) == book
    (entry,) = book.entries
    assert (book.committable, entry.done_by, entry.is_dead_letter) == (entry, "r3", True)
    assert book.committed(entry).next_offset == 10


def test_a_new_claim_starts_behind_the_last_one() -> None:
    """Ranges of a partition are contiguous."""
    assert ledger().claimed_until == 0
    assert ledger(10, 25).claimed_until == 25
    assert ledger(10, 25).entries[1].range == span(0, 10, 25)
