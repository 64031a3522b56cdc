"""Rows of a DataFrame that a batch sets aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.decoding.columns import quoted
from dagster_rebalance.spark.ranges import explained_read_errors
from dagster_rebalance.spark.spark_jobs import cache_for_batch, is_connect

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import DataFrame

_Position = tuple[str, int, int, "str | None"]
"""Topic, partition and offset of a record, and the reason why it is set aside."""

_MOST_LITERALS = 10_000
"""Offsets in a condition; Spark parses 200,000 of them in 10 seconds."""


def positions_in(frame: DataFrame, error: str | None) -> list[_Position]:
    """Return the topic, partition, offset and reason of all rows.

    `error` is the column of the reasons; without it, the reasons are None.
    """
    reason = "NULL" if error is None else quoted(error)
    found = frame.selectExpr("topic", "partition", "offset", f"CAST({reason} AS STRING) AS reason")
    with explained_read_errors():
        return [tuple(row) for row in found.collect()]


def split(frame: DataFrame, error: str, batch_id: str) -> tuple[DataFrame, list[_Position]]:
    """Return the rows of records without a reason in the column `error`, and the other positions.

    The frame is computed once, and cached until the batch has ended. With Spark Connect it is
    computed twice: the cache of a killed run would stay on the server. Spark may also compute lost
    blocks of a cache again, and a column may then have other reasons. So the records of the first
    computation are left out, and not the rows that have a reason in the second one.
    """
    cached = frame if is_connect(frame.sparkSession) else cache_for_batch(frame, batch_id)
    found = positions_in(cached.filter(f"{quoted(error)} IS NOT NULL"), error)
    unknown = f"the column {error} had no reason when Spark computed it again"
    bad: list[_Position] = [
        (topic, number, offset, unknown if reason is None else reason)
        for topic, number, offset, reason in found
    ]
    return _without(cached.drop(error), bad) if bad else cached.drop(error), bad


def _without(frame: DataFrame, positions: list[_Position]) -> DataFrame:
    if len(positions) <= _MOST_LITERALS:
        return frame.filter(f"NOT coalesce({_is_at(positions)}, false)")
    found = frame.sparkSession.createDataFrame(
        [position[:-1] for position in positions], "topic string, partition int, offset long"
    )
    columns = [quoted(name) for name in frame.columns]  # a join puts its columns first
    kept = frame.join(found.hint("broadcast"), ["topic", "partition", "offset"], "left_anti")
    return kept.selectExpr(*columns)


def _is_at(positions: Iterable[_Position]) -> str:
    """Return the condition that a row has one of the positions."""
    offsets: dict[tuple[str, str], set[str]] = {}
    for topic, number, offset, _ in positions:
        offsets.setdefault((_literal(topic), _literal(number)), set()).add(_literal(offset))
    conditions = (
        f"(topic = {topic} AND partition = {number} AND offset IN ({', '.join(found)}))"
        for (topic, number), found in offsets.items()
    )
    return " OR ".join(conditions)


def _literal(value: object) -> str:
    """Return a value in SQL. The columns of a user may have any type."""
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(value)
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
