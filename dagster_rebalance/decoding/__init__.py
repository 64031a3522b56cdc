"""Payloads become values: Avro, Protobuf and JSON, as plain Python and as Arrow.

Spark's executors run these modules without this package being installed there: they travel with
the work (`spark.reading.decoded`). So they import nothing of the package but each other and two
modules of the core, and the libraries of a format only where it is used.
"""
