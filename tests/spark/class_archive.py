"""Write an archive of Spark's classes, with which each JVM of Spark starts at half the cost.

`make test` calls it before the tests (AppCDS, JEP 350). Argument: the file.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from dagster_rebalance.testing.local.java import SHORT_LIVED


def main(archive: Path) -> None:
    """Write the classes of a session that has used Spark Connect, Parquet and a shuffle."""
    part = archive.with_suffix(".part")
    flags = (*SHORT_LIVED, f"-XX:ArchiveClassesAtExit={part}", "-Xlog:disable")
    os.environ["SPARK_SUBMIT_OPTS"] = " ".join(flags)
    settings: dict[str, bool | float | int | str | None] = {
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }
    session = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    gateway = session.sparkContext._gateway
    assert gateway is not None
    with tempfile.TemporaryDirectory() as folder:
        rows = session.range(10).selectExpr("id % 3 AS kind", "id")
        rows.write.partitionBy("kind").parquet(f"{folder}/out")
        session.read.parquet(f"{folder}/out").groupBy("kind").count().collect()
    session.stop()
    # The JVM writes the archive when its standard input ends.
    gateway.proc.stdin.close()
    gateway.proc.wait(300)
    part.touch()  # a Java without class sharing has written none, and ignores an empty one
    part.rename(archive)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
