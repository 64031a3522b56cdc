"""Orders from Kafka to Parquet with Spark: a project as `create-dagster` makes it, with one asset."""
