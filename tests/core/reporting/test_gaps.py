"""Offsets that no recorded commit covers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.reporting.gaps import Recorded, gaps
from tests.core.world import span


def recorded(*bounds: tuple[int, int], partition: int = 0) -> list[Recorded]:
    """Commits, each by a separate run."""
    return [Recorded(span(partition, *pair), f"run-{index}") for index, pair in enumerate(bounds)]


def test_adjacent_commits_have_no_gap() -> None:
    assert gaps(recorded((40, 50), (50, 60), (60, 61))) == ()
    assert gaps([]) == ()


def test_gap_names_its_offsets_and_runs() -> None:
    (gap,) = gaps(recorded((0, 10), (10, 20), (25, 30)))
    assert gap.range == span(0, 20, 25)
    assert str(gap) == (
        "no commit covers orders-0 [20, 25): run run-1 ended before it, and run run-2 began after "
        "it"
    )


def test_gaps_are_found_by_partition() -> None:
    both = [*recorded((0, 10), (11, 20), partition=3), *recorded((5, 9), (8, 12), (13, 14))]
    assert [gap.range for gap in gaps(both)] == [span(0, 12, 13), span(3, 10, 11)]


def test_recorded_skip_is_no_gap() -> None:
    records = recorded((0, 10), (25, 30))
    assert gaps(records, [span(0, 10, 25)]) == ()
    assert gaps(records, [span(0, 5, 40)]) == ()
    for other in (span(1, 10, 25), span(0, 10, 24), span(0, 11, 25)):
        assert [gap.range for gap in gaps(records, [other])] == [span(0, 10, 25)]


def test_adjacent_skips_are_joined() -> None:
    records = recorded((0, 10), (20, 30))
    assert gaps(records, [span(0, 12, 20), span(0, 10, 12)]) == ()
    assert gaps(records, [span(0, 10, 14), span(0, 12, 20)]) == ()
    assert gaps(records, [span(0, 10, 14), span(0, 15, 20), span(1, 14, 15)])


def test_late_record_closes_the_gap() -> None:
    assert gaps(recorded((0, 10), (20, 30), (10, 20), (0, 10))) == ()
    assert gaps(recorded((10, 20), (0, 10), (20, 30))) == ()


def test_record_inside_another_one_makes_no_gap() -> None:
    assert gaps(recorded((0, 30), (10, 20), (30, 40))) == ()


def test_offset_moved_back_restarts_the_history() -> None:
    assert gaps(recorded((400, 500), (0, 10), (10, 20))) == ()
    assert gaps(recorded((0, 100), (50, 60), (60, 200))) == ()
    (gap,) = gaps(recorded((400, 500), (0, 10), (12, 20)))
    assert gap.range == span(0, 10, 12)


@given(st.permutations(range(6)), st.sets(st.integers(1, 4), max_size=3))
def test_gaps_are_exactly_the_missing_offsets(order: list[int], missing: set[int]) -> None:
    kept = [number for number in order if number not in missing and number != 0]
    found = gaps(recorded((0, 10), *((10 * n, 10 * n + 10) for n in kept)))
    lost = {
        number for gap in found for number in range(gap.range.start // 10, gap.range.until // 10)
    }
    assert lost == missing - set(range(max(kept, default=0), 6))
