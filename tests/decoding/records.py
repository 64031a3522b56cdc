"""Payloads as producers write them, and batches of them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow as pa
from confluent_kafka import Message
from google.protobuf import descriptor_pb2

from dagster_rebalance import KafkaBatch, OffsetRange
from dagster_rebalance.decoding.batches import decode_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dagster_rebalance.decoding.decoder import OpenDecoder

Json = Any
"""A schema or a value of JSON."""
ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [{"name": "id", "type": "long"}, {"name": "item", "type": "string"}],
}


def framed(schema_id: int, data: bytes, indexes: bytes = b"") -> bytes:
    return b"\x00" + schema_id.to_bytes(4, "big") + indexes + data


def avro(schema_id: int, schema: Json, value: object) -> bytes:
    """Return a value in Avro, with its frame."""
    written = io.BytesIO()
    fastavro.schemaless_writer(written, fastavro.parse_schema(schema), value)
    return framed(schema_id, written.getvalue())


def batch(*values: bytes | None, keys: Iterable[bytes | None] = (), **more: Any) -> KafkaBatch:  # noqa: ANN401 - of a message
    given = list(keys) or [None] * len(values)
    messages = [
        Message(topic="orders", partition=0, offset=at, key=key, value=value, **more)
        for at, (key, value) in enumerate(zip(given, values, strict=True))
    ]
    return KafkaBatch.for_testing([OffsetRange("orders", 0, 0, len(values))], messages=messages)


def decoded_array(
    decoder: OpenDecoder, payloads: Iterable[bytes | None], header_names: Sequence[Sequence[str]]
) -> tuple[Any, list[str | None]]:  # of pyarrow, which has no types
    return decode_array(decoder, pa.array(list(payloads), pa.binary()), header_names)


def proto_file(
    package: str, messages: Iterable[descriptor_pb2.DescriptorProto], *imports: str
) -> descriptor_pb2.FileDescriptorProto:
    """Return a file in proto3."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="proto3", dependency=imports
    )
    file.message_type.extend(messages)
    return file


def proto_message(name: str, /, **fields: str) -> descriptor_pb2.DescriptorProto:
    """Return a message of fields with a scalar or a message type, with `[]` if repeated."""
    message = descriptor_pb2.DescriptorProto(name=name)
    for number, (field_name, kind) in enumerate(fields.items(), 1):
        field = message.field.add(name=field_name, number=number)
        field.label = field.LABEL_REPEATED if kind.endswith("[]") else field.LABEL_OPTIONAL
        kind = kind.removesuffix("[]")  # noqa: PLW2901 - the rest of it
        if kind.startswith("."):
            field.type, field.type_name = field.TYPE_MESSAGE, kind
        else:
            field.type = field.Type.Value(f"TYPE_{kind.upper()}")
    return message
