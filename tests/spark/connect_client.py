"""A process that works in a Connect session, and continues after it was stopped.

Arguments: URL, folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.spark.slow_write import write_slowly

session = SparkSession.builder.remote(sys.argv[1]).getOrCreate()


def work(attempt: str) -> None:
    try:
        write_slowly(session, Path(sys.argv[2]) / attempt)
        print(attempt, "finished", flush=True)  # noqa: T201 - the test reads it
    except PySparkException as error:
        print(attempt, str(error).replace("\n", " ")[:200], flush=True)  # noqa: T201 - the test reads it


work("first")
work("second")
