"""Parts of a bisected range: their batch ids, and the attempts that contain them."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.model.offsets import MAX_OFFSET
from dagster_rebalance.core.runs.bisection import (
    Part,
    PartKind,
    is_waiting,
    tried_as,
    whole_batch,
)
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from tests.core.world import span


def part(start: int, until: int, kind: PartKind = PartKind.TRIED) -> Part:
    return Part("b1", kind, start, until)


@pytest.mark.parametrize("kind", PartKind)
@pytest.mark.parametrize("batch_id", ["b-0123456789abcdef", "s.0a-1b.7.2", "a.1-12"])
def test_batch_id_of_a_part_is_read_back(kind: PartKind, batch_id: str) -> None:
    one = Part(batch_id, kind, MAX_OFFSET - 9, MAX_OFFSET)
    assert Part.parse(str(one)) == one
    assert Part.parse(batch_id) is None
    assert is_waiting(str(one)) is (kind in {PartKind.SUSPECT, PartKind.REST})
    assert not is_waiting(batch_id)
    assert tried_as("b2", str(one)) == one.of(PartKind.TRIED, "b2")
    assert tried_as("b2", batch_id) == "b2"


def test_batch_of_a_streaming_run_keeps_its_part() -> None:
    text = f"s.{'0' * 36}.7.2.t0-40"
    batch = StreamBatch.parse(text)
    assert batch is not None
    assert (batch.number, batch.attempt, batch.part) == (7, 2, ".t0-40")
    assert str(batch) == text
    assert not batch.is_unbegun
    assert whole_batch(text) == ""
    assert whole_batch("b1.n0-40") == "b1"
    assert whole_batch("b1") == ""


def test_larger_nodes_of_a_part() -> None:
    assert part(0, 100).larger(span(0, 12, 25)) == (
        span(0, 0, 100),
        span(0, 0, 50),
        span(0, 0, 25),
    )
    assert part(0, 100).larger(span(0, 0, 50)) == (span(0, 0, 100),)


@given(st.integers(0, 10_000), st.integers(1, 5_000), st.data())
def test_largest_node_at_an_offset_covers_the_range_in_few_steps(
    start: int, length: int, data: st.DataObject
) -> None:
    one = part(start, start + length)
    assert one.bisected(span(0, 0, 1)) == span(0, start, start + length)
    offset, nodes = start + data.draw(st.integers(0, length - 1)), 0
    while offset < one.until:
        first, until = one.node_at(offset)
        assert first == offset
        inside = span(0, first, until)
        assert all(larger.start <= first and until <= larger.until for larger in one.larger(inside))
        offset, nodes = until, nodes + 1
    assert nodes <= ceil(log2(length)) + 1 if length > 1 else nodes == 1
