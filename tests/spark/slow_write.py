"""Spark work that takes minutes, and writes a file that Spark removes if the work is stopped."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dagster_rebalance.testing.deadline import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

ROWS = 6000
STOP_LIMIT_S = 120.0
"""Enough for a busy machine, and less than the work takes."""


def write_slowly(session: SparkSession, folder: Path) -> None:
    """Keep one core busy for minutes: write a row each 50 ms into a file."""
    rows = session.range(0, ROWS, 1, 1).selectExpr(
        "id", "java_method('java.lang.Thread', 'sleep', bigint(50)) AS slept"
    )
    rows.write.mode("overwrite").parquet(str(folder))


def files_in_work(folder: Path) -> int:
    # Not rglob, which raises if Spark removes a folder during the walk.
    walked = os.walk(folder)
    return sum(name.startswith("part-") for _, _, names in walked for name in names)


def wait_until_working(folder: Path) -> None:
    wait_until(
        lambda: files_in_work(folder) > 0, timeout_s=200, what=f"Spark to write into {folder}"
    )


def wait_until_stopped(folder: Path) -> None:
    """Return when the write was abandoned: only a stopped job removes its temporary folder."""
    wait_until(
        lambda: files_in_work(folder) == 0,
        timeout_s=STOP_LIMIT_S,
        what=f"Spark to give up its write into {folder}",
    )
