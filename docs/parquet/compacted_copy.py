"""Copy committed ranges into few large files."""

from pyspark.sql import SparkSession


def copy_compacted(spark: SparkSession, source: str, target: str, status: list[dict]) -> None:
    """Copy committed ranges into a new folder; `status` is that of the group."""
    done = [
        (row["topic"], row["partition"], row["committed"])
        for row in status
        if row["committed"] is not None
    ]
    committed = spark.createDataFrame(done, "topic string, partition int, committed bigint")
    rows = spark.read.parquet(source).join(committed, ["topic", "partition"])
    rows = rows.where("range_until <= committed").drop("committed", "topic_partition")
    rows.repartition("topic", "partition").write.parquet(target)
