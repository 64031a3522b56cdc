"""The project has one asset, which writes orders from Kafka to Parquet with Spark.

Its layout is the one that `create-dagster` makes.
"""
