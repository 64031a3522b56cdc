"""Confluent's wire format: the schema id of a payload, and the start of its data.

A frame is a magic byte 0 and a schema id in four bytes. Protobuf adds the path to the message
within its schema. The newer frame with a schema GUID, in the payload or in a header, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dagster_rebalance.core.model.errors import UndecodableError

SchemaType = Literal["AVRO", "PROTOBUF", "JSON"]

HEADER_BYTES = 5
_GUID_HEADER_BYTES = 17
_MAX_VARINT_BYTES = 5
_MAX_INDEXES = 100
GUID_HEADERS = {"key": "__key_schema_id", "value": "__value_schema_id"}
"""Record headers in which newer serializers put the GUID of a schema."""


@dataclass(frozen=True)
class SchemaText:
    """A registered schema as plain data, without a login or a connection.

    The text of Protobuf is a serialised file descriptor in base64. `references` has the name and
    text of each schema that this schema references, directly or not, after its own dependencies.
    """

    text: str
    references: tuple[tuple[str, str], ...] = ()


class Frame(NamedTuple):
    """The writer's schema of a payload, the position of its data, and the Protobuf message in it.

    `indexes` is the path to the message, outermost first.
    """

    schema_id: int
    starts_at: int
    indexes: tuple[int, ...] = ()


def parse_frame(payload: bytes, *, has_indexes: bool = False) -> Frame:
    """Parse the frame of a payload; set `has_indexes` for Protobuf."""
    if len(payload) < HEADER_BYTES or payload[0] != 0:
        raise UndecodableError(_why_no_frame(payload))
    schema_id = int.from_bytes(payload[1:HEADER_BYTES], "big")
    if not has_indexes:
        return Frame(schema_id, HEADER_BYTES)
    indexes, starts_at = _parse_indexes(payload)
    return Frame(schema_id, starts_at, indexes)


def _why_no_frame(payload: bytes) -> str:
    if not payload:
        return "it is empty: it has neither a magic byte nor a schema id"
    if payload[0] == 1 and len(payload) >= _GUID_HEADER_BYTES:
        return (
            "it begins with magic byte 1, the frame with the GUID of a schema, which is not "
            "supported: configure the producer to write schema ids"
        )
    if payload[0] != 0:
        return (
            f"it begins with byte {payload[0]} and not with magic byte 0: it is not in the wire "
            "format of a schema registry"
        )
    return f"it has {len(payload)} bytes, too few for a magic byte and a schema id"


def _parse_indexes(payload: bytes) -> tuple[tuple[int, ...], int]:
    """Parse a count and as many indexes; a count of 0 means the first message."""
    count, at = _parse_varint(payload, HEADER_BYTES)
    if count == 0:
        return (0,), at
    if not 0 < count <= _MAX_INDEXES:
        msg = f"its message indexes are damaged: the count is {count}"
        raise UndecodableError(msg)
    indexes = []
    for _ in range(count):
        index, at = _parse_varint(payload, at)
        indexes.append(index)
    return tuple(indexes), at


def _parse_varint(payload: bytes, at: int) -> tuple[int, int]:
    """Parse a zigzag varint; return its value and its end."""
    value = 0
    for shift, byte in enumerate(payload[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:  # noqa: PLR2004 - the continuation bit
            return (value >> 1) ^ -(value & 1), at + shift + 1
    msg = "its message indexes are truncated"
    raise UndecodableError(msg)
