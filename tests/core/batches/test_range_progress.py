"""What is read together, when a partition is done, and what is gone."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.batches.range_progress import Unread, read_rounds
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
def test_rounds_cover_every_range_once_with_one_gapless_span_per_partition(
    ranges: list[OffsetRange],
) -> None:
    """A range left out is data lost; one read twice is data doubled."""
    if not ranges:
        return
    rounds = read_rounds(ranges)
    assert sorted(one for spans in rounds for each in spans for one in each) == sorted(ranges)
    for spans in rounds:
        partitions = [each[0].topic_partition for each in spans]
        assert len(partitions) == len(set(partitions))
        for each in spans:
            assert all(one.until == following.start for one, following in pairwise(each))


def test_ranges_that_follow_each_other_are_read_as_one() -> None:
    """Each round costs Spark a scan and a planning of its own, and a client a new fetch."""
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
    """They would give some records twice."""
    with pytest.raises(IllegalStateError, match=r"a-0 \[0, 10\) and a-0 \[9, 20\)"):
        read_rounds([OffsetRange("a", 0, 9, 20), OffsetRange("a", 0, 0, 10)])


def test_a_batch_without_ranges_is_refused() -> None:
    """Spark would read whole topics when it is told no offsets, and a client nothing."""
    with pytest.raises(IllegalStateError, match="at least one range"):
        read_rounds([])


def unread() -> Unread:
    """Two ranges that follow each other in partition 0, and one in partition 1."""
    return Unread([(span(0, 5, 10), span(0, 10, 20)), (span(1, 0, 3),)])


def test_each_partition_is_read_from_the_start_of_its_span_to_the_end() -> None:
    """Ranges that follow each other are one span."""
    left = unread()
    assert left.positions == {tp(0): 5, tp(1): 0}
    assert left.ends == {tp(0): 20, tp(1): 3}


def test_a_partition_is_done_when_nothing_before_its_end_is_left() -> None:
    """Its last offset need not have a record; the next record may lie far behind the end."""
    left = unread()
    assert left.read_to(tp(0), 7)
    assert left.positions == {tp(0): 7, tp(1): 0}
    assert left.read_to(tp(0), 20)
    assert left.positions == {tp(1): 0}
    assert left.read_to(tp(1), 1000)
    assert not left.positions
    assert not left.ends


def test_only_what_is_new_counts_as_progress() -> None:
    """A position that is told again and again must not keep a read from its time-out."""
    left = unread()
    assert not left.read_to(tp(0), 5)
    assert not left.read_to(tp(0), 2)
    assert not left.read_to(tp(7), 1)
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
def test_offsets_that_can_never_come_are_said(bounds: Bounds, why: str) -> None:
    """Waiting for them would never end, and going on without them would lose them."""
    gone = unread().why_gone({tp(0): bounds, tp(1): Bounds(0, 3)})
    assert list(gone) == [tp(0)]
    assert re.search(why, gone[tp(0)])
    assert "dagster-rebalance reset" in gone[tp(0)]


def test_a_log_that_has_all_offsets_or_whose_bounds_are_not_known_is_waited_for() -> None:
    """The records come when a leader is there, or a transaction ends."""
    assert not unread().why_gone({tp(0): Bounds(5, 20)})


def test_what_was_read_before_it_was_deleted_is_not_missing() -> None:
    """Retention may delete behind a reader."""
    left = unread()
    left.read_to(tp(0), 20)
    left.read_to(tp(1), 2)
    assert not left.why_gone({tp(0): Bounds(20, 30), tp(1): Bounds(2, 3)})
