"""Ranges of batches that share one materialization, and their packed form."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.operators.rerun_selection import shown_ranges
from dagster_rebalance.core.reporting.joined_ranges import JoinedRanges, unpacked_ranges
from tests.core.world import span, tp


def exact_ranges(packed: str) -> list[OffsetRange]:
    return [range_ for range_, count in unpacked_ranges(packed) if count == 1]


def joined(*batches: tuple[tuple[int, int, int], ...]) -> JoinedRanges:
    ranges = JoinedRanges()
    for number, batch in enumerate(batches, 1):
        ranges.add([span(*one) for one in batch], number)
    return ranges


def test_joined_ranges_are_read_back_one_by_one() -> None:
    ranges = joined(((0, 0, 5), (1, 7, 9)), ((0, 5, 8),), ((0, 20, 21), (1, 9, 30)))
    assert exact_ranges(ranges.packed()) == [
        span(0, 0, 5),
        span(0, 5, 8),
        span(0, 20, 21),
        span(1, 7, 9),
        span(1, 9, 30),
    ]
    assert ranges.offsets == 8 + 1 + 23


def test_text_shows_joined_ranges_and_no_single_range_of_them() -> None:
    """A rerun would process a range from the text with these bounds."""
    ranges = joined(((0, 0, 5), (1, 7, 9)), ((0, 5, 8),))
    assert str(ranges) == "- `orders-0` [0, 8) in 2 ranges\n- `orders-1 [7, 9)`"
    assert list(shown_ranges(str(ranges))) == [span(1, 7, 9)]


def test_text_of_many_partitions_is_short() -> None:
    lines = str(joined(tuple((number, 0, 5) for number in range(1_000)))).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "- and 980 more"


def test_of_many_ranges_only_the_spans_are_packed() -> None:
    batches = [tuple((number, at, at + 5) for number in range(600)) for at in range(0, 50, 5)]
    found = unpacked_ranges(joined(*batches).packed())
    assert found == [(span(number, 0, 50), 10) for number in range(600)]


def test_ranges_of_any_number_of_partitions_are_joined() -> None:
    """From about 400 partitions, few parts of each are kept."""
    for partitions in range(1, 600, 7):
        ranges = JoinedRanges()
        ranges.add([span(other, 0, 5) for other in range(1, partitions)], 0)
        for number in range(20):
            ranges.add([span(0, number, number + 1)], number)
        assert ranges.offsets == 20 + 5 * (partitions - 1)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=3_000))
def test_merged_ranges_are_never_read_as_one(lengths: list[int]) -> None:
    ranges, at, batches = JoinedRanges(), 0, []
    for number, length in enumerate(lengths):
        batches.append(span(0, at, at + length))
        ranges.add(batches[-1:], number)
        at += length
    exact = exact_ranges(ranges.packed())
    assert set(exact) <= set(batches)
    assert ranges.offsets == at
    if len(batches) <= 500:
        assert exact == batches
    counts = [count for _, count in unpacked_ranges(ranges.packed())]
    assert sum(counts) == len(batches)


@pytest.mark.parametrize(
    "text",
    [
        "no base64!",
        "aGVsbG8=",
        *(
            base64.b64encode(zlib.compress(plain.encode())).decode()
            for plain in ("orders", "orders 0 x 5", "orders 0 5 -9", "orders 0 0 5*x*2 \x00")
        ),
    ],
)
def test_damaged_ranges_are_no_ranges(text: str) -> None:
    assert unpacked_ranges(text) == []


def test_ranges_of_many_partitions_with_a_long_topic_name_are_read_back() -> None:
    batch = [OffsetRange("t" * 249, number, 10**15, 10**15 + 10) for number in range(10_000)]
    ranges = JoinedRanges()
    ranges.add(batch, 1)
    assert exact_ranges(ranges.packed()) == batch


@pytest.mark.parametrize("text", ["orders 0 5 12", "orders 0 5 9\n" * 2**21])
def test_ranges_that_are_cut_off_are_no_ranges(text: str) -> None:
    """The last one would be read with another end."""
    packed = zlib.compress(text.encode())
    cut = packed if len(text) > 100 else packed[:-5]
    assert unpacked_ranges(base64.b64encode(cut).decode()) == []


def test_ranges_touch_their_partitions_only() -> None:
    ranges = joined(((0, 0, 5),))
    assert ranges.touches({tp(0), tp(1)})
    assert not ranges.touches({tp(1)})
