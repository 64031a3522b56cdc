"""Rows of a DataFrame that a batch sets aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.decoding.columns import quoted
from dagster_rebalance.spark.ranges import explained_read_errors
from dagster_rebalance.spark.spark_jobs import cache_for_batch, is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def positions_in(frame: DataFrame, error: str | None) -> list[tuple[str, int, int, str | None]]:
    """Return the topic, partition, offset and reason of all rows.

    `error` is the column of the reasons; without it, the reasons are None.
    """
    reason = "NULL" if error is None else quoted(error)
    found = frame.selectExpr("topic", "partition", "offset", f"CAST({reason} AS STRING) AS reason")
    with explained_read_errors():
        return [tuple(row) for row in found.collect()]


def split(
    frame: DataFrame, error: str, batch_id: str
) -> tuple[DataFrame, list[tuple[str, int, int, str | None]]]:
    """Return the rows whose column `error` is null, and the positions of the others.

    The frame is computed once, and cached until the batch has ended. With Spark Connect it is
    computed twice: the cache of a killed run would stay on the server.
    """
    cached = frame if is_connect(frame.sparkSession) else cache_for_batch(frame, batch_id)
    bad = positions_in(cached.filter(f"{quoted(error)} IS NOT NULL"), error)
    return cached.filter(f"{quoted(error)} IS NULL").drop(error), bad
