"""The search for finished runs that late records of commits name."""

from __future__ import annotations

from dagster_rebalance.core.operators.late_search import (
    CLOCKS_DIFFER_S,
    LATE_WITHIN_S,
    CommitRecord,
    LateSearch,
)
from dagster_rebalance.core.operators.prune_runs import FinishedRun

DAY_S = 86_400.0
FIRST, SECOND = FinishedRun("r-1", 10 * DAY_S), FinishedRun("r-2", 20 * DAY_S)


def names(search: LateSearch) -> list[str]:
    return [run.run_id for run in search.left]


def test_run_with_a_late_record_is_needed_and_the_search_continues_at_the_next_run() -> None:
    search = LateSearch([SECOND, FIRST], 1)
    assert search.after == FIRST.ended_at - CLOCKS_DIFFER_S
    search.add([CommitRecord(FIRST.ended_at + 1, "r-1"), CommitRecord(FIRST.ended_at + 2)])
    assert search.needed == {"r-1"}
    assert names(search) == ["r-2"]
    assert search.after == SECOND.ended_at - CLOCKS_DIFFER_S
    assert not search.is_over, "none was found that no record needs"
    search.add([CommitRecord(SECOND.ended_at - 1, "r-2")])
    assert search.is_over


def test_run_is_decided_three_days_after_the_first_record_that_follows_its_end() -> None:
    continued = FIRST.ended_at + 5 * DAY_S
    search = LateSearch([FIRST], 1)
    search.add([CommitRecord(FIRST.ended_at - 1)])
    search.add([CommitRecord(continued)])
    search.add([])
    search.add([CommitRecord(continued + LATE_WITHIN_S - 1)])
    assert names(search) == ["r-1"]
    search.add([CommitRecord(continued + LATE_WITHIN_S)])
    assert search.is_over
    assert not search.needed


def test_clock_that_is_ahead_decides_no_run() -> None:
    search = LateSearch([FIRST], 1)
    search.add([CommitRecord(FIRST.ended_at + 1)])
    search.add([CommitRecord(FIRST.ended_at + 90 * DAY_S), CommitRecord(FIRST.ended_at + 2)])
    assert names(search) == ["r-1"]
    search.add([CommitRecord(FIRST.ended_at + 3, "r-1")])
    assert search.needed == {"r-1"}


def test_search_ends_at_its_limit_once_a_run_was_found_that_none_needs() -> None:
    late = FinishedRun("r-3", FIRST.ended_at + LATE_WITHIN_S + DAY_S)
    search = LateSearch([FIRST, late], 2)
    for day in range(5):
        search.add([CommitRecord(FIRST.ended_at + day * DAY_S)])
        assert not search.is_over
    assert names(search) == ["r-3"]
    for second in range(2):
        search.add([CommitRecord(late.ended_at + second)])
    assert search.is_over
    assert names(search) == ["r-3"]


def test_first_runs_search_begins_at_zero() -> None:
    assert LateSearch([FinishedRun("r-1", 5.0)], 1).after == 0.0
