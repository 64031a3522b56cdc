"""How ranges are grouped for a connector that takes one start and one end per partition."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.errors import BrokerError, ConfigurationError, IllegalStateError
from dagster_rebalance.core.partition import OffsetRange, TopicPartition
from dagster_rebalance.spark.ranges import explained_read_errors, read_ranges, read_rounds

UNKNOWN_TOPIC = (
    "java.util.concurrent.ExecutionException: o.a.k.UnknownTopicOrPartitionException: This server "
    "does not host"
)
NO_CONNECTOR = "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: kafka. Make sure"


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
    assert sorted(one for spans in rounds for span in spans for one in span) == sorted(ranges)
    for spans in rounds:
        partitions = [span[0].topic_partition for span in spans]
        assert len(partitions) == len(set(partitions))
        for span in spans:
            assert all(one.until == following.start for one, following in pairwise(span))


def test_ranges_that_follow_each_other_are_read_as_one() -> None:
    """Each round costs Spark a scan and a planning of its own."""
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
    """Spark would read whole topics when it is told no offsets."""
    with pytest.raises(IllegalStateError, match="at least one range"):
        read_rounds([])


@pytest.mark.parametrize(
    "option",
    [
        "failOnDataLoss",
        "startingTimestamp",
        "EndingTimestamp",
        "startingOffsetsByTimestamp",
        "endingOffsetsByTimestamp",
        "startingOffsetsByTimestampStrategy",
        "subscribePattern",
        "assign",
    ],
)
def test_the_offsets_cannot_be_overridden_by_options(option: str) -> None:
    """Without failOnDataLoss, a deleted range is committed as processed.

    Timestamps win over offsets.
    """

    class NoSession:
        """Is not reached."""

    with pytest.raises(ConfigurationError, match=option):
        read_ranges(
            NoSession(),  # type: ignore[arg-type]
            [OffsetRange("a", 0, 0, 1)],
            {"bootstrap.servers": "a:1"},
            connector_options={option: "false"},
        )


def test_a_deleted_topic_and_a_missing_connector_are_explained() -> None:
    """Both come as stack traces of the JVM."""
    with (
        pytest.raises(BrokerError, match="deleted after the batch was planned"),
        explained_read_errors(),
    ):
        raise RuntimeError(UNKNOWN_TOPIC)
    with (
        pytest.raises(ConfigurationError, match=r"spark-sql-kafka-0-10_2\.13"),
        explained_read_errors(),
    ):
        raise RuntimeError(NO_CONNECTOR)


def test_a_partition_of_a_topic_with_dashes_is_named_in_full() -> None:
    """Spark joins topic and partition with a dash, and so may the topic's name have some."""
    text = (
        "Could not read records in offset [5, 9) for topic partition my-topic-1-12\n"
        "with consumer group spark"
    )
    with pytest.raises(BrokerError) as caught, explained_read_errors():
        raise RuntimeError(text)
    assert list(caught.value.partitions) == [TopicPartition("my-topic-1", 12)]


def test_missing_records_are_said_with_both_causes_and_no_advice_that_skips_new_records() -> None:
    """After a truncation, the offsets are filled anew.

    An offset that is set past them skips those records.
    """
    text = (
        "Could not read records in offset [5, 50) for topic partition orders-0\n"
        "with consumer group spark"
    )
    with pytest.raises(BrokerError) as caught, explained_read_errors():
        raise RuntimeError(text)
    message = str(caught.value)
    assert all(cause in message for cause in ("retention", "unclean", "transaction", "anew"))
    assert message.index("kafka-get-offsets") < message.index("reset-offsets")


def test_other_errors_pass_unchanged() -> None:
    """A user's own mistake must stay what it is."""
    with pytest.raises(ZeroDivisionError), explained_read_errors():
        _ = 1 / 0
