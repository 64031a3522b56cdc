"""Refused connector options, and explained errors of a read."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.spark.ranges import explained_read_errors, read_ranges

UNKNOWN_TOPIC = (
    "java.util.concurrent.ExecutionException: o.a.k.UnknownTopicOrPartitionException: This server "
    "does not host"
)
NO_CONNECTOR = "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: kafka. Make sure"


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
def test_options_cannot_override_the_offsets(option: str) -> None:

    class NoSession:
        """A session that is never used."""

    with pytest.raises(ConfigurationError, match=option):
        read_ranges(
            NoSession(),  # type: ignore[arg-type]
            [OffsetRange("a", 0, 0, 1)],
            {"bootstrap.servers": "a:1"},
            connector_options={option: "false"},
        )


def test_deleted_topic_and_missing_connector_are_explained() -> None:
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


def test_timestamp_overflow_is_explained() -> None:
    text = (
        "Lost task 0.0 in stage 0.0 (TID 0): java.lang.ArithmeticException: long overflow\n"
        "\tat java.base/java.lang.Math.multiplyExact(Math.java:1004)\n"
        "\tat org.apache.spark.sql.catalyst.util.SparkDateTimeUtils.millisToMicros(Spark"
    )
    with (
        pytest.raises(BrokerError, match=r"timestamp.*kafka_batch\.arrow"),
        explained_read_errors(),
    ):
        raise RuntimeError(text)


def test_partition_of_a_topic_with_dashes_is_parsed() -> None:
    text = (
        "Could not read records in offset [5, 9) for topic partition my-topic-1-12\n"
        "with consumer group spark"
    )
    with pytest.raises(BrokerError) as caught, explained_read_errors():
        raise RuntimeError(text)
    assert list(caught.value.partitions) == [TopicPartition("my-topic-1", 12)]


def test_lost_records_are_explained_with_all_causes() -> None:
    """After a truncation, new records get the same offsets, so the advice must not skip them."""
    text = (
        "Could not read records in offset [5, 50) for topic partition orders-0\n"
        "with consumer group spark"
    )
    with pytest.raises(BrokerError) as caught, explained_read_errors():
        raise RuntimeError(text)
    message = str(caught.value)
    assert all(cause in message for cause in ("retention", "unclean", "transaction", "recreated"))
    assert message.index("kafka-get-offsets") < message.index("dagster-rebalance reset")


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(ZeroDivisionError), explained_read_errors():
        _ = 1 / 0
