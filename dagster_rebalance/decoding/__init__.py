"""Decoding of payloads: Avro, Protobuf and JSON into Python values and Arrow columns.

Spark's executors run these modules without this package: the modules are pickled into the plan
(`spark.decoded_frame`). They therefore import only each other and two modules of the core,
and load the library of a format on first use.
"""
