"""Offsets are half-open ranges of one partition."""

from __future__ import annotations

import pytest

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
    next_offset,
    partitions_named,
)
from tests.core.world import span, tp


@pytest.mark.parametrize(("start", "until"), [(-1, 5), (5, 5), (6, 5)])
def test_a_range_that_is_empty_or_negative_is_refused(start: int, until: int) -> None:
    """An empty range could be claimed and committed without any work."""
    with pytest.raises(ValueError, match=r"orders-0 must have 0 <= start < until"):
        OffsetRange("orders", 0, start, until)


@pytest.mark.parametrize("topic", ["", ".", "..", "a/b", "a b", "a'b", "a\n", "ä", "x" * 250])
def test_what_kafka_does_not_take_for_a_topic_is_in_no_range(topic: str) -> None:
    """The topic of a range becomes part of paths, of SQL and of keys.

    People type the config of a run, so any text may arrive there.
    """
    assert not is_topic_name(topic)
    with pytest.raises(ValueError, match="cannot be the name of a topic"):
        OffsetRange(topic, 0, 0, 5)


@pytest.mark.parametrize("topic", ["...", ".a", "a..b", "a-1", "_A.b-C_9", "x" * 249])
def test_every_name_that_kafka_takes_is_in_order(topic: str) -> None:
    """Odd ones included."""
    assert OffsetRange(topic, 0, 0, 5).topic == topic


def test_a_range_does_not_pass_kafkas_largest_offset() -> None:
    """Kafka and Spark count in 64 bits; Python in as many as it takes."""
    assert len(OffsetRange("orders", 0, 0, MAX_OFFSET)) == MAX_OFFSET
    with pytest.raises(ValueError, match="cannot end above 9223372036854775807"):
        OffsetRange("orders", 0, 0, MAX_OFFSET + 1)


def test_ranges_that_touch_do_not_overlap() -> None:
    """`until` is not part of the range."""
    assert not span(0, 0, 10).overlaps(span(0, 10, 20))
    assert span(0, 0, 11).overlaps(span(0, 10, 20))
    assert not span(0, 0, 11).overlaps(span(1, 10, 20))


def test_a_range_names_itself_for_people_and_for_outputs() -> None:
    """An output is keyed by topic, partition and both bounds."""
    range_ = span(3, 120, 240)
    assert (str(range_), range_.key, len(range_)) == (
        "orders-3 [120, 240)",
        "orders-3-120-240",
        120,
    )
    assert range_.topic_partition == tp(3)


def test_a_commit_during_a_rebalance_is_an_error_to_try_again_after() -> None:
    """KIP-429: the partitions are still owned."""
    error = RebalanceInProgressError("rebalancing", partitions={tp(0): "REBALANCE_IN_PROGRESS"})
    assert error.retriable
    assert error.partitions == {tp(0): "REBALANCE_IN_PROGRESS"}
    assert not PartitionLostError("fenced").retriable
    assert BrokerError("down").partitions == {}


def test_the_offset_to_commit_is_that_of_the_next_record() -> None:
    """Off by one, the last record is read again, or one is skipped."""
    assert next_offset(0) == 1


def test_names_of_partitions_are_read_and_all_else_is_left_out() -> None:
    """People and other programs write beside ours."""
    names = ["orders-3", "a-b-0", "orders", 7, "orders-x", "-1", "orders-12345678901"]
    assert list(partitions_named(names)) == [tp(3), TopicPartition("a-b", 0)]
    assert list(partitions_named("orders-3")) == list(partitions_named(None)) == []
