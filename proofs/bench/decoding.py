"""`decoded`: Avro payloads into columns without Spark, beside fastavro's own loop into dicts.

`decoded_in_spark`: Avro and JSON records through `KafkaBatch.decoded`, beside Spark's `from_avro`
and `from_json` by hand on the DataFrame of the same batch. Both keep all columns of the records,
and read them without a sink.
"""

from __future__ import annotations

import io
import json
import time
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow as pa

from dagster_rebalance import KafkaBatch, KafkaConsumerResource, plain_json
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.decoding.batches import decode_array
from dagster_rebalance.decoding.decoder import Decoder, KnownSchemas
from dagster_rebalance.decoding.wire_format import SchemaText
from dagster_rebalance.orchestration.resources.registry import Encoding
from dagster_rebalance.orchestration.storage.run_tags import format_range
from dagster_rebalance.testing.local.jars import Coordinates, JarSet
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.spark_batches import connected, fill

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.spark_connect import SparkConnectServer

_HEADER = b"\x00\x00\x00\x00\x01"
_BATCH = 10_000
_SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "item", "type": "string"},
        {"name": "customer", "type": "string"},
        {"name": "quantity", "type": "int"},
        {"name": "price", "type": "double"},
        {"name": "is_paid", "type": "boolean"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "note", "type": ["null", "string"]},
        {"name": "shop", "type": ["null", "long"]},
        {"name": "status", "type": {"type": "enum", "name": "Status", "symbols": ["NEW", "SENT"]}},
    ],
}
_JSON_TYPES = {
    "id": "integer",
    "item": "string",
    "customer": "string",
    "quantity": "integer",
    "price": "number",
    "is_paid": "boolean",
    "at": "integer",
    "note": ["null", "string"],
    "shop": ["null", "integer"],
    "status": "string",
}
_JSON_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": kind} for name, kind in _JSON_TYPES.items()},
}
_JSON_DDL = (
    "id BIGINT, item STRING, customer STRING, quantity BIGINT, price DOUBLE, is_paid BOOLEAN, "
    "at BIGINT, note STRING, shop BIGINT, status STRING"
)
_PARTITIONS = 4
_WARM_UP = 2


def spark_avro() -> JarSet:
    """Return the jars of Spark's Avro functions for the installed pyspark."""
    artifact = Coordinates("org.apache.spark", "spark-avro_2.13", version("pyspark"))
    return JarSet(f"spark-avro-{version('pyspark')}", (artifact,), ("org.scala-lang",))


def measure(*, runs: int, records: int, step: Callable[[str], None]) -> list[Entry]:
    """Decode the same payloads of ten fields, in turn by both."""
    parsed = fastavro.parse_schema(_SCHEMA)
    payloads = [_payload(parsed, number) for number in range(_BATCH)]
    schema = SchemaText(json.dumps(_SCHEMA))
    opened = Decoder("value", "avro", schema, KnownSchemas({1: schema})).open()
    together, names = pa.array(payloads, pa.binary()), [()] * _BATCH
    batches = max(records // _BATCH, 1)

    def ours() -> None:
        for _ in range(batches):
            decode_array(opened, together, names)

    def fastavro_loop() -> None:
        for _ in range(batches):
            for payload in payloads:
                data = io.BytesIO(payload)
                data.seek(len(_HEADER))
                fastavro.schemaless_reader(data, parsed, None)

    samples = []
    for run in range(runs):
        step(f"decoded, run {run + 1} of {runs}")
        took_s: dict[Callable[[], None], float] = {}
        for decode in (ours, fastavro_loop) if run % 2 else (fastavro_loop, ours):
            began_at = time.perf_counter()
            decode()
            took_s[decode] = time.perf_counter() - began_at
        mine, theirs = (batches * _BATCH / took_s[one] for one in (ours, fastavro_loop))
        samples.append(Sample(mine, theirs, mine / theirs))
    case = f"{batches * _BATCH:,} Avro records of 10 fields into columns against fastavro's dicts"
    return [Entry("decoded", case, "records/s", "records/s", Goal(">=", 0.8), samples)]


def measure_in_spark(
    kafka: KafkaCluster,
    server: SparkConnectServer,
    *,
    runs: int,
    records: int,
    step: Callable[[str], None],
) -> list[Entry]:
    """Decode the same records of ten fields in Spark, in turn by both."""
    from pyspark.sql.connect import functions  # noqa: PLC0415 - takes a second
    from pyspark.sql.connect.avro.functions import from_avro  # noqa: PLC0415 - the same

    text = json.dumps(_SCHEMA)
    parsed = fastavro.parse_schema(_SCHEMA)

    def avro_by_hand(frame: DataFrame) -> DataFrame:
        data = functions.expr("substring(value, 6)")
        return frame.withColumn("value", from_avro(data, text))

    def json_by_hand(frame: DataFrame) -> DataFrame:
        data = functions.expr("CAST(value AS STRING)")
        return frame.withColumn("value", functions.from_json(data, _JSON_DDL))

    avro = Encoding("avro", reader=text, registry=_OneSchema(SchemaText(text)))  # type: ignore[arg-type]
    cases: dict[str, tuple[list[bytes], Encoding, Callable[[DataFrame], DataFrame]]] = {
        "Avro": ([_payload(parsed, number) for number in range(_BATCH)], avro, avro_by_hand),
        "JSON": (
            [json.dumps(_order(number)).encode() for number in range(_BATCH)],
            plain_json(json.dumps(_JSON_SCHEMA)),
            json_by_hand,
        ),
    }
    entries = []
    with connected(server) as session:
        spark = SimpleNamespace(spark_session=session)
        for name, (values, encoding, by_hand) in cases.items():
            step(f"decoded_in_spark, producing {records:,} records in {name}")
            topic = fill(kafka, [records // _PARTITIONS] * _PARTITIONS, values)
            batch = _batch(kafka, topic, records // _PARTITIONS)
            read: dict[str, Callable[[], DataFrame]] = {
                "ours": partial(batch.decoded, spark, value=encoding),
                "by hand": partial(
                    lambda hand, batch: hand(batch.dataframe(spark)), by_hand, batch
                ),
            }
            samples = []
            for run in range(1 - _WARM_UP, 1 + runs):
                what = f"run {run} of {runs}" if run > 0 else "warming up"
                step(f"decoded_in_spark, {name}, {what}")
                rates = {
                    form: records / _took_s(read[form])
                    for form in sorted(read, reverse=bool(run % 2))
                }
                mine, theirs = rates["ours"], rates["by hand"]
                samples.append(Sample(mine, theirs, mine / theirs))
            case = f"{records:,} records of 10 fields in {name} against Spark's function by hand"
            goal = Goal(">=", 0.9)
            entries.append(
                Entry("decoded_in_spark", case, "records/s", "records/s", goal, samples[_WARM_UP:])
            )
            kafka.delete_topic(topic)
    return entries


def _took_s(read: Callable[[], DataFrame]) -> float:
    began_at = time.perf_counter()
    read().write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began_at


class _OneSchema:
    """A registry with one schema."""

    def __init__(self, schema: SchemaText) -> None:
        self._schema = schema

    def by_id(self, *_: object) -> SchemaText:
        return self._schema


def _batch(kafka: KafkaCluster, topic: str, each: int) -> KafkaBatch:
    ranges = [OffsetRange(topic, number, 0, each) for number in range(_PARTITIONS)]
    resource = KafkaConsumerResource(
        bootstrap_servers=kafka.bootstrap_servers, group_id="bench", topics=[topic]
    )
    return KafkaBatch(
        kafka=resource, batch_id="bench", ranges=[format_range(one) for one in ranges]
    )


def _payload(schema: Any, number: int) -> bytes:  # noqa: ANN401 - of fastavro
    written = io.BytesIO()
    fastavro.schemaless_writer(written, schema, _order(number))
    return _HEADER + written.getvalue()


def _order(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "item": f"item-{number % 100}",
        "customer": f"customer-{number}",
        "quantity": number % 7,
        "price": number / 100,
        "is_paid": number % 2 == 0,
        "at": 1_700_000_000_000 + number,
        "note": None if number % 3 else "leave it at the door",
        "shop": number % 50 if number % 2 else None,
        "status": "NEW",
    }
