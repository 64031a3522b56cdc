"""Rows of a DataFrame are set aside with the bytes of their records, in classic and Connect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Message

from dagster_rebalance import IllegalStateError, KafkaBatch, OffsetRange, plain_json
from dagster_rebalance.spark.output import write_parquet_by_range
from dagster_rebalance.spark.spark_jobs import is_connect, settle_batch

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
MARK = "CASE WHEN offset % 4 = 1 THEN concat('bad ', offset) END AS `the reason`"


def batch() -> KafkaBatch:
    messages = [
        Message(topic="orders", partition=0, offset=at, key=b"k", value=b'{"id": %d}' % at)
        for at in range(12)
    ]
    return KafkaBatch.for_testing([OffsetRange("orders", 0, 0, 12)], messages=messages)


def test_bad_rows_become_letters_and_good_rows_are_written(
    session: SparkSession, tmp_path: Path
) -> None:
    given, spark = batch(), SimpleNamespace(spark_session=session)
    schema = plain_json('{"type": "object", "properties": {"id": {"type": "integer"}}}')
    frame = given.decoded(spark, value=schema).selectExpr("*", MARK)
    good = given.good_rows(frame, error="the reason")
    assert good.columns == frame.columns[:-1]
    assert write_parquet_by_range(good, str(tmp_path / "out")) == 9
    assert [(one.key, one.reason, one.value) for one in given.letters] == [
        (f"orders-0-{at}", f"bad {at}", b'{"id": %d}' % at) for at in (1, 5, 9)
    ]
    assert given.metadata()["set_aside"] == 3
    if not is_connect(session):
        assert frame.storageLevel.useMemory, "cached until the batch is settled"
        settle_batch(given.batch_id, is_done=True)
        assert not frame.storageLevel.useMemory


def test_frame_of_bad_rows_is_set_aside(session: SparkSession) -> None:
    given, spark = batch(), SimpleNamespace(spark_session=session)
    frame = given.dataframe(spark).selectExpr("topic", "partition", "offset", MARK)
    bad = frame.where("`the reason` IS NOT NULL")
    assert given.set_aside(bad, "the reason") == 3
    assert given.set_aside(frame.where("offset < 2"), ValueError("all")) == 2
    assert {one.key: one.reason for one in given.letters} == {
        "orders-0-0": "ValueError: all",
        "orders-0-1": "ValueError: all",
        "orders-0-5": "bad 5",
        "orders-0-9": "bad 9",
    }
    with pytest.raises(IllegalStateError, match="offset 0 has no reason"):
        given.set_aside(frame, "the reason")
    with pytest.raises(IllegalStateError, match="without the column 'partition'"):
        given.good_rows(frame.drop("partition"), error="the reason")


@pytest.mark.parametrize("most_literals", [10_000, 2])
def test_record_is_set_aside_or_written_if_its_reason_changes(
    session: SparkSession, monkeypatch: pytest.MonkeyPatch, most_literals: int
) -> None:
    """Spark computes a frame again, and a column may then have other values."""
    monkeypatch.setattr("dagster_rebalance.spark.set_aside._MOST_LITERALS", most_literals)
    given, spark = batch(), SimpleNamespace(spark_session=session)
    reason = "IF(rand() < 0.5, concat('bad ', offset), NULL) AS `the reason`"
    frame = given.dataframe(spark).selectExpr("value", "topic", "partition", "offset", reason)
    good = given.good_rows(frame, error="the reason")
    assert good.columns == frame.columns[:-1]
    for _ in range(3):
        rows = [row.offset for row in good.collect()]
        letters = [one.range.start for one in given.letters]
        assert sorted(rows + letters) == list(range(12))


def test_no_row_of_a_record_that_is_set_aside_is_written(session: SparkSession) -> None:
    given, spark = batch(), SimpleNamespace(spark_session=session)
    parts = "explode(array(1, 2)) AS part"
    frame = given.dataframe(spark).selectExpr("topic", "partition", "offset", parts)
    reason = "IF(offset = 3 AND part = 2, 'bad', NULL) AS why"
    good = given.good_rows(frame.selectExpr("*", reason), error="why")
    assert [one.key for one in given.letters] == ["orders-0-3"]
    assert sorted(row.offset for row in good.collect()) == sorted([*range(3), *range(4, 12)] * 2)


def test_row_without_an_offset_cannot_be_set_aside(session: SparkSession) -> None:
    given, spark = batch(), SimpleNamespace(spark_session=session)
    frame = given.dataframe(spark).selectExpr("topic", "partition", "CAST(NULL AS LONG) AS offset")
    with pytest.raises(IllegalStateError, match="offset None is not in batch"):
        given.set_aside(frame, ValueError("all"))
    with pytest.raises(IllegalStateError, match="offset None is not in batch"):
        given.good_rows(frame.selectExpr("*", "'bad' AS why"), error="why")
    other = frame.selectExpr('"it\'s" AS topic', "partition", "0L AS offset", "'bad' AS why")
    with pytest.raises(IllegalStateError, match="it's-0 offset 0 is not in batch"):
        given.good_rows(other, error="why")
