"""The records of a batch as Arrow, in the columns of Spark's Kafka source. pyarrow is optional."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.decoding.batches import UNDECODABLE, UNDECODABLE_PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from confluent_kafka import Message

    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.decoding.decoder import Decoder

_RECORDS_PER_BATCH = 10_000
_MAX_CHUNK_BYTES = 64 << 20
_MAX_MS = (1 << 63) // 1000 - 1
"""The limit of a column of microseconds. A producer that writes nanoseconds exceeds it."""


def pyarrow() -> Any:  # noqa: ANN401 - it has no types
    """Return the library."""
    try:
        return import_module("pyarrow")
    except ImportError as problem:
        msg = f"kafka_batch.arrow needs pyarrow: install it with `pip install pyarrow` ({problem})"
        raise ConfigurationError(msg) from problem


def record_schema() -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return the columns of records that are not decoded."""
    pa = pyarrow()
    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    return pa.schema(
        [
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("timestamp", pa.timestamp("us", "UTC")),
            ("timestampType", pa.int32()),
            ("headers", pa.list_(header)),
            ("range_start", pa.int64()),
            ("range_until", pa.int64()),
        ]
    )


def decoded_schema(decoders: Iterable[Decoder], *, keeps_undecodable: bool) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return the columns of records whose keys, values or both are decoded."""
    pa = pyarrow()
    schema = record_schema()
    for decoder in decoders:
        at = schema.get_field_index(decoder.part)
        schema = schema.set(at, pa.field(decoder.part, decoder.open().column.arrow()))
    if keeps_undecodable:
        kinds = [(name, getattr(pa, kind)()) for name, kind in UNDECODABLE_PARTS]
        schema = schema.append(pa.field(UNDECODABLE, pa.struct(kinds)))
    return schema


def chunks(messages: Iterable[Message], most: int) -> Iterator[list[Message]]:
    """Yield messages in chunks of up to `most`, or fewer if their values reach 64 MiB."""
    chunk: list[Message] = []
    size = 0
    for message in messages:
        chunk.append(message)
        size += len(message)
        if len(chunk) == most or size >= _MAX_CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def record_batches(messages: Iterator[Message], ranges: Sequence[OffsetRange]) -> Iterator[Any]:
    """Yield messages of some ranges as record batches."""
    pa = pyarrow()
    schema = record_schema()
    by_partition: dict[tuple[str, int], list[OffsetRange]] = {}
    for range_ in ranges:
        by_partition.setdefault((range_.topic, range_.partition), []).append(range_)
    for chunk in chunks(messages, _RECORDS_PER_BATCH):
        rows = [_row(message, by_partition) for message in chunk]
        columns = zip(*rows, strict=True)
        arrays = [
            pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _row(
    message: Message, by_partition: dict[tuple[str, int], list[OffsetRange]]
) -> tuple[object, ...]:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    ranges = by_partition[topic or "", partition or 0]
    range_ = next(one for one in ranges if one.start <= (offset or 0) < one.until)
    kind, at_ms = message.timestamp()
    headers: Any = message.headers()
    return (
        *(as_bytes(message.key()), as_bytes(message.value()), topic, partition, offset),
        at_ms * 1000 if kind and abs(at_ms) <= _MAX_MS else None,
        kind - 1,  # Kafka's client numbers the types from 1, Spark from 0
        headers and [{"key": name, "value": as_bytes(value)} for name, value in headers],
        *(range_.start, range_.until),
    )


def as_bytes(value: str | bytes | None) -> bytes | None:
    """Return a key, value or header as bytes; the client's types also allow text."""
    return value.encode() if isinstance(value, str) else value
