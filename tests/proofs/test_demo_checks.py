"""Each check of the demo is shown a run that went wrong in one way, and must fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.model.offsets import OffsetRange
from proofs.demo.checks import Check, check_committed, check_output
from proofs.demo.per_batch.checks import check_holds, check_materialisations, is_retained
from proofs.witness.catalogue import HoldSeen
from proofs.witness.offsets_topic import Commit
from proofs.witness.output import Row, compare_output

PRODUCED = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1)}
ROWS = [Row(0, 0, 0, 0, 2), Row(1, 1, 0, 0, 2), Row(2, 0, 1, 0, 2), Row(3, 1, 1, 0, 2)]


def _output(rows: list[Row]) -> Check:
    return check_output(compare_output(PRODUCED, rows))


def test_output_with_every_record_once_passes() -> None:
    assert _output(ROWS[::-1]) == Check(
        "every record exactly once", passed=True, detail="4 records, none lost, none doubled"
    )


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (ROWS[1:], "1 lost (0)"),
        ([*ROWS, ROWS[2]], "1 doubled (2)"),
        ([*ROWS[1:], ROWS[1]], "1 lost (0); 1 doubled (1)"),
        ([*ROWS, Row(9, 0, 2, 2, 3)], "1 not as produced (9)"),
        (
            [ROWS[0]._replace(range_start=1), *ROWS[1:]],
            "1 not as produced (0)",
        ),
        ([ROWS[0]._replace(offset=1), *ROWS[1:]], "1 not as produced (0)"),
    ],
    ids=[
        "lost",
        "doubled",
        "lost and doubled: as many rows as records",
        "never produced",
        "in another range",
        "at another offset",
    ],
)
def test_output_with_a_fault_fails_and_names_it(rows: list[Row], sentence: str) -> None:
    assert _output(rows) == Check("every record exactly once", passed=False, detail=sentence)


def test_record_confirmed_without_an_offset_is_at_an_unused_offset() -> None:
    produced = {**PRODUCED, 2: (0, None)}
    assert not compare_output(produced, ROWS).wrong
    for elsewhere in (Row(2, 1, 1, 0, 2), Row(2, 0, 0, 0, 2)):
        assert compare_output(produced, [elsewhere]).wrong == (elsewhere,)


def test_many_faults_are_counted_and_some_named() -> None:
    assert (
        check_output(compare_output({number: (0, number) for number in range(9)}, [])).detail
        == "9 lost (0, 1, 2, 3, 4, ...)"
    )


def test_offset_behind_the_end_fails() -> None:
    assert check_committed({0: 5, 1: 7}, {0: 5, 1: 7}).passed
    assert check_committed({0: 5}, {0: 5, 1: 7}) == Check(
        "committed offsets equal end offsets", passed=False, detail="partition 1: 0 of 7"
    )


FIRST, SECOND = OffsetRange("orders", 0, 0, 10), OffsetRange("orders", 0, 10, 25)
COMMITS = [Commit(FIRST, 100.0), Commit(SECOND, 120.0)]


def test_commits_shown_once_each_pass() -> None:
    assert check_materialisations(COMMITS, [], [SECOND, FIRST]).passed


@pytest.mark.parametrize(
    ("went_back", "materialised", "sentence"),
    [
        ([], [FIRST], "1 not shown by Dagster (orders-0 [10, 25))"),
        ([], [FIRST, SECOND, SECOND], "1 shown that Kafka has not (orders-0 [10, 25))"),
        (
            [],
            [FIRST, FIRST],
            (
                "1 not shown by Dagster (orders-0 [10, 25)); "
                "1 shown that Kafka has not (orders-0 [0, 10))"
            ),
        ),
        (["it went back"], [FIRST, SECOND], "it went back"),
    ],
    ids=["missing", "shown twice", "as many as commits, but not the same", "an offset went back"],
)
def test_commit_not_shown_exactly_once_fails(
    went_back: list[str], materialised: list[OffsetRange], sentence: str
) -> None:
    assert check_materialisations(COMMITS, went_back, materialised) == Check(
        "one materialization for each commit", passed=False, detail=sentence
    )


HOLD = HoldSeen(
    "blue",
    "drained",
    "revoke",
    ("orders-4", "orders-5"),
    seconds=20.0,
    ended_at=120.0,
    runs=2,
    retained_records=300,
)


@pytest.mark.parametrize(
    ("commit", "counts"),
    [
        (Commit(OffsetRange("orders", 0, 0, 10), 110.0), True),
        (Commit(OffsetRange("orders", 4, 0, 10), 110.0), False),
        (Commit(OffsetRange("orders", 0, 0, 10), 99.0), False),
        (Commit(OffsetRange("orders", 0, 0, 10), 121.0), False),
    ],
    ids=["another partition, during the hold", "a held partition", "before", "after"],
)
def test_retained_progress_has_only_commits_of_other_partitions_during_the_hold(
    commit: Commit, *, counts: bool
) -> None:
    assert is_retained(commit, HOLD) is counts


def test_drained_holds_with_progress_elsewhere_pass() -> None:
    idle = replace(HOLD, outcome="nothing to do", seconds=0.1, retained_records=0)
    assert check_holds([HOLD, idle, HOLD]) == Check(
        "retained partitions went on during holds", passed=True, detail="600 records during 2 holds"
    )
    leave = replace(HOLD, cause="leave", retained_records=0)
    assert check_holds([HOLD, leave]).passed, (
        "a member that leaves retains no partition, so the batches of others do not count"
    )


@pytest.mark.parametrize(
    ("holds", "sentence"),
    [
        ([HOLD], "1 holds were drained, at least 2 are wanted"),
        ([HOLD, replace(HOLD, outcome="deadline")], "1 holds were drained, at least 2 are wanted"),
        (
            [HOLD, replace(HOLD, retained_records=0)],
            "no progress elsewhere while blue held orders-4, orders-5",
        ),
        (
            [replace(HOLD, seconds=1.0, retained_records=0)] * 2,
            "no record of a retained partition was committed during any hold",
        ),
    ],
    ids=[
        "one hold only",
        "a hold that ran into its deadline",
        "a hold during which all stood still",
        "holds too short to tell",
    ],
)
def test_holds_without_evidence_fail(holds: list[HoldSeen], sentence: str) -> None:
    assert check_holds(holds) == Check(
        "retained partitions went on during holds", passed=False, detail=sentence
    )
