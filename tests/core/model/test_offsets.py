"""Offsets are half-open ranges of one partition."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dagster_rebalance.core.model.errors import (
    BrokerError,
    PartitionLostError,
    RebalanceInProgressError,
)
from dagster_rebalance.core.model.offsets import (
    MAX_OFFSET,
    OffsetRange,
    TopicPartition,
    is_topic_name,
    listed,
    next_offset,
    parse_listed,
    parse_offsets,
    parse_partitions,
)
from tests.core.world import span, tp


@pytest.mark.parametrize(("start", "until"), [(-1, 5), (5, 5), (6, 5)])
def test_empty_or_negative_range_is_refused(start: int, until: int) -> None:
    with pytest.raises(ValueError, match=r"orders-0 must have 0 <= start < until"):
        OffsetRange("orders", 0, start, until)


@pytest.mark.parametrize("topic", ["", ".", "..", "a/b", "a b", "a'b", "a\n", "ä", "x" * 250])
def test_range_with_invalid_topic_is_refused(topic: str) -> None:
    """Topics become part of paths, SQL and keys, and run config is typed by users."""
    assert not is_topic_name(topic)
    with pytest.raises(ValueError, match="cannot be the name of a topic"):
        OffsetRange(topic, 0, 0, 5)


@pytest.mark.parametrize("topic", ["...", ".a", "a..b", "a-1", "_A.b-C_9", "x" * 249])
def test_range_accepts_every_valid_topic(topic: str) -> None:
    assert OffsetRange(topic, 0, 0, 5).topic == topic


def test_range_beyond_largest_offset_is_refused() -> None:
    assert len(OffsetRange("orders", 0, 0, MAX_OFFSET)) == MAX_OFFSET
    with pytest.raises(ValueError, match="cannot end above 9223372036854775807"):
        OffsetRange("orders", 0, 0, MAX_OFFSET + 1)


def test_adjacent_ranges_do_not_overlap() -> None:
    assert not span(0, 0, 10).overlaps(span(0, 10, 20))
    assert span(0, 0, 11).overlaps(span(0, 10, 20))
    assert not span(0, 0, 11).overlaps(span(1, 10, 20))


def test_range_has_text_and_output_key() -> None:
    range_ = span(3, 120, 240)
    assert (str(range_), range_.key, len(range_)) == (
        "orders-3 [120, 240)",
        "orders-3-120-240",
        120,
    )
    assert range_.topic_partition == tp(3)


def test_rebalance_in_progress_is_retriable() -> None:
    error = RebalanceInProgressError("rebalancing", partitions={tp(0): "REBALANCE_IN_PROGRESS"})
    assert error.retriable
    assert error.partitions == {tp(0): "REBALANCE_IN_PROGRESS"}
    assert not PartitionLostError("fenced").retriable
    assert BrokerError("down").partitions == {}


def test_next_offset_is_one_above() -> None:
    assert next_offset(0) == 1


def test_parse_partitions_ignores_other_values() -> None:
    names = ["orders-3", "a-b-0", "orders", 7, "orders-x", "-1", "orders-12345678901"]
    assert list(parse_partitions(names)) == [tp(3), TopicPartition("a-b", 0)]
    assert list(parse_partitions("orders-3")) == list(parse_partitions(None)) == []


@given(
    st.frozensets(st.builds(TopicPartition, st.sampled_from(["a", "a-1..2"]), st.integers(0, 300)))
)
@example(frozenset(map(tp, range(300))) - {tp(7), tp(100), tp(102)})
def test_listed_partitions_are_parsed_again(partitions: frozenset[TopicPartition]) -> None:
    assert frozenset(parse_listed(listed(partitions))) == partitions


def test_listed_names_spans_of_more_than_a_hundred_partitions() -> None:
    assert listed(map(tp, range(100))) == [f"orders-{number}" for number in range(100)]
    assert listed(map(tp, (*range(100), 200))) == ["orders-0..99", "orders-200"]
    assert listed(map(tp, (*range(99), 200, 201))) == ["orders-0..98", "orders-200", "orders-201"]


def test_parse_listed_ignores_other_values() -> None:
    assert list(parse_listed(["orders-3..4", "orders-9..1", "orders-0..9999999999", 7])) == [
        tp(3),
        tp(4),
    ]
    assert list(parse_listed("orders-3")) == []


def test_offsets_are_parsed_as_one_record_or_as_a_range() -> None:
    assert parse_offsets("orders:3@1207") == OffsetRange("orders", 3, 1207, 1208)
    assert parse_offsets("my-orders-3@0-12") == OffsetRange("my-orders", 3, 0, 12)


@pytest.mark.parametrize("text", ["orders:3", "orders@3", ":3@1", "orders:3@1-", "orders:3@5-5"])
def test_other_text_is_no_offset(text: str) -> None:
    with pytest.raises(ValueError, match=r"offset|start"):
        parse_offsets(text)
