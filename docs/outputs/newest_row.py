"""A table with the newest row of each key, in Iceberg or Delta Lake."""

import dagster as dg

from dagster_rebalance import KafkaBatch, KafkaSparkResource

TABLE = "lake.shop.customers"


@dg.asset
def customers(kafka_batch: KafkaBatch, spark: KafkaSparkResource) -> None:
    kafka_batch.dataframe(spark).selectExpr(
        "string(key) AS id", "string(value) AS body", "partition", "offset"
    ).createOrReplaceTempView("changes")
    spark.spark_session.sql(f"""
        MERGE INTO {TABLE} AS old
        USING (
            SELECT newest.*
            FROM (SELECT max_by(struct(*), offset) AS newest FROM changes GROUP BY id)
        ) AS new
        ON old.id = new.id
        WHEN MATCHED AND new.offset >= old.offset THEN UPDATE SET *
        WHEN NOT MATCHED THEN INSERT *
    """)
