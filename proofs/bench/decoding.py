"""`decoded`: Avro payloads into columns without Spark, beside fastavro's own loop into dicts."""

from __future__ import annotations

import io
import json
import time
from typing import TYPE_CHECKING, Any

import fastavro

from dagster_rebalance.decoding.batches import decode_array
from dagster_rebalance.decoding.decoder import Decoder, KnownSchemas
from dagster_rebalance.decoding.wire_format import SchemaText
from proofs.bench.entries import Entry, Goal, Sample

if TYPE_CHECKING:
    from collections.abc import Callable

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


def measure(*, runs: int, records: int, step: Callable[[str], None]) -> list[Entry]:
    """Decode the same payloads of ten fields, in turn by both."""
    parsed = fastavro.parse_schema(_SCHEMA)
    payloads = [_payload(parsed, number) for number in range(_BATCH)]
    schema = SchemaText(json.dumps(_SCHEMA))
    opened = Decoder("value", "avro", schema, KnownSchemas({1: schema})).open()
    names = [()] * _BATCH
    batches = max(records // _BATCH, 1)

    def ours() -> None:
        for _ in range(batches):
            decode_array(opened, payloads, names)

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


def _payload(schema: Any, number: int) -> bytes:  # noqa: ANN401 - of fastavro
    order = {
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
    written = io.BytesIO()
    fastavro.schemaless_writer(written, schema, order)
    return _HEADER + written.getvalue()
