"""Progress of reading exact ranges."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.batches.range_progress import UnreadOffsets, read_rounds
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.offsets import Bounds, OffsetRange
from tests.core.world import span, tp


@st.composite
def disjoint_ranges(draw: st.DrawFn) -> list[OffsetRange]:
    """Ranges of a few partitions that do not overlap, in any order."""
    ranges = []
    for topic in ("a", "b"):
        for partition in draw(st.sets(st.integers(0, 3), max_size=3)):
            bounds = sorted(draw(st.sets(st.integers(0, 30), min_size=2, max_size=8)))
            pairs = list(pairwise(bounds))
            ranges += [
                OffsetRange(topic, partition, *pair) for pair in pairs if draw(st.booleans())
            ]
    return draw(st.permutations(ranges))


@given(disjoint_ranges())
def test_rounds_cover_each_range_once_in_gapless_spans(
    ranges: list[OffsetRange],
) -> None:
    if not ranges:
        return
    rounds = read_rounds(ranges)
    assert sorted(one for spans in rounds for each in spans for one in each) == sorted(ranges)
    for spans in rounds:
        partitions = [each[0].topic_partition for each in spans]
        assert len(partitions) == len(set(partitions))
        for each in spans:
            assert all(one.until == following.start for one, following in pairwise(each))


def test_adjacent_ranges_are_one_span() -> None:
    assert (
        len(
            read_rounds(
                [
                    OffsetRange("a", 0, 10, 20),
                    OffsetRange("a", 0, 0, 10),
                    OffsetRange("a", 0, 20, 21),
                ]
            )
        )
        == 1
    )


def test_overlapping_ranges_are_refused() -> None:
    with pytest.raises(IllegalStateError, match=r"a-0 \[0, 10\) and a-0 \[9, 20\)"):
        read_rounds([OffsetRange("a", 0, 9, 20), OffsetRange("a", 0, 0, 10)])


def test_batch_without_ranges_is_refused() -> None:
    """Spark would read whole topics."""
    with pytest.raises(IllegalStateError, match="at least one range"):
        read_rounds([])


def unread() -> UnreadOffsets:
    """Two ranges that follow each other in partition 0, and one in partition 1."""
    return UnreadOffsets([(span(0, 5, 10), span(0, 10, 20)), (span(1, 0, 3),)])


def test_unread_offsets_start_with_each_span() -> None:
    left = unread()
    assert left.positions == {tp(0): 5, tp(1): 0}
    assert left.ends == {tp(0): 20, tp(1): 3}


def test_partition_is_done_at_end_without_record_there() -> None:
    left = unread()
    assert left.advance(tp(0), 7)
    assert left.positions == {tp(0): 7, tp(1): 0}
    assert left.advance(tp(0), 20)
    assert left.positions == {tp(1): 0}
    assert left.advance(tp(1), 1000)
    assert not left.positions
    assert not left.ends


def test_repeated_position_is_no_progress() -> None:
    left = unread()
    assert not left.advance(tp(0), 5)
    assert not left.advance(tp(0), 2)
    assert not left.advance(tp(7), 1)
    assert left.positions == {tp(0): 5, tp(1): 0}


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        (Bounds(6, 100), r"orders-0 begins at 6: the offsets \[5, 6\) were deleted"),
        (Bounds(50, 100), r"orders-0 begins at 50: the offsets \[5, 20\) were deleted"),
        (Bounds(0, 19), "orders-0 ends at 19, before 20: it was truncated"),
        (Bounds(0, 3), "orders-0 ends at 3, before 20: it was truncated"),
    ],
)
def test_missing_offsets_are_reported(bounds: Bounds, why: str) -> None:
    gone = unread().why_gone({tp(0): bounds, tp(1): Bounds(0, 3)})
    assert list(gone) == [tp(0)]
    assert re.search(why, gone[tp(0)])
    assert "dagster-rebalance reset" in gone[tp(0)]


def test_complete_or_unknown_log_is_not_missing() -> None:
    assert not unread().why_gone({tp(0): Bounds(5, 20)})


def test_deleted_offsets_that_were_read_are_not_missing() -> None:
    left = unread()
    left.advance(tp(0), 20)
    left.advance(tp(1), 2)
    assert not left.why_gone({tp(0): Bounds(20, 30), tp(1): Bounds(2, 3)})
