"""Decode records without Spark."""

import dagster as dg

from dagster_rebalance import KafkaBatch, SchemaRegistryResource


@dg.asset
def refunds(kafka_batch: KafkaBatch, registry: SchemaRegistryResource) -> dg.MaterializeResult:
    rows = 0
    for record in kafka_batch.decoded_messages(value=registry.avro(), dead_letters="undecodable"):
        if record.value is not None:  # no tombstone
            print(record.message.offset(), record.value["id"])
            rows += 1
    return dg.MaterializeResult(metadata=kafka_batch.metadata(row_count=rows))
