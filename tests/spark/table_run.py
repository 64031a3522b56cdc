"""A process with a local Spark that writes a range to a table of each format without a commit.

Arguments: the folder of Iceberg's tables, and that of the test.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from pyspark.sql import SparkSession

from dagster_rebalance.testing.local.jars import fetch
from dagster_rebalance.testing.spark_connect import DELTA_LAKE, ICEBERG, table_settings
from tests.spark.lakes import FORMATS, Table
from tests.spark.test_tables import records, slowly, span

warehouse, folder = map(Path, sys.argv[1:])
settings: dict[str, bool | float | int | str | None] = {
    **table_settings(warehouse),
    "spark.jars": ",".join(str(jar) for jars in (DELTA_LAKE, ICEBERG) for jar in fetch(jars)),
    "spark.ui.enabled": "false",
}
session = SparkSession.builder.master("local[4]").config(map=settings).getOrCreate()


def write(table: Table) -> None:
    """Write with a second task that waits, so there is no commit."""
    frame = slowly(records(session, span(0, 100), "b"), 50, 600_000)
    table.write(frame, [span(0, 100)], as_read=True)


for format_ in FORMATS:
    threading.Thread(target=write, args=(Table.of(format_, warehouse, folder),)).start()
