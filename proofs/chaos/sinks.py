"""Outputs with Spark: Parquet by range, or a table of Delta Lake or Iceberg.

Every run imports this module, so it imports almost nothing.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from dagster_rebalance.spark.delta_and_iceberg import write_delta, write_iceberg
from dagster_rebalance.spark.output import write_parquet_by_range

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame

    from dagster_rebalance.core.model.offsets import OffsetRange


class Sink(enum.Enum):
    """The kinds of outputs."""

    PARQUET = "parquet"
    DELTA = "delta"
    ICEBERG = "iceberg"

    def write(self, frame: DataFrame, output: Path, ranges: Sequence[OffsetRange]) -> None:
        """Replace ranges of the output in a folder."""
        if self is Sink.DELTA:
            write_delta(frame, str(output / "numbers"), ranges)
        elif self is Sink.ICEBERG:
            write_iceberg(frame, self.table(output), ranges)
        else:
            write_parquet_by_range(frame, str(output))

    def table(self, output: Path) -> str:
        """Return the name of the output in SQL, if it is a table."""
        return "lake.chaos.numbers" if self is Sink.ICEBERG else f"delta.`{output / 'numbers'}`"
