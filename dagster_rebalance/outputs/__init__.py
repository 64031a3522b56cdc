"""Output by range, for Spark and for Arrow: names of files, columns, rows and publication.

`spark` and `arrow` write the same files and tables, so a group may move from one to the other. This
package imports neither pyspark, Dagster nor a Kafka client.
"""
