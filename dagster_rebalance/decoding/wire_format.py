"""Confluent's wire format: which schema a payload was written with, and where its data begins.

Owns what is a framed payload and what is not: a magic byte 0 and the id of a schema in four bytes;
for Protobuf also the path to the message within its schema. What else there is (the newer frame
with a GUID, in the payload or in a header) is refused with the reason.
"""

from __future__ import annotations

from typing import NamedTuple

from dagster_rebalance.core.model.errors import UndecodableError

_ID_ENDS = 5
_GUID_ENDS = 17
_MOST_VARINT_BYTES = 5
_MOST_INDEXES = 100
GUID_HEADERS = {"key": "__key_schema_id", "value": "__value_schema_id"}
"""Where newer serializers may put the GUID of a schema."""


class Frame(NamedTuple):
    """What stands before the data.

    Attributes:
        schema_id: Of the schema that it was written with.
        starts_at: Where the data begins.
        indexes: Protobuf: the path to the message, from the file's messages inwards.
    """

    schema_id: int
    starts_at: int
    indexes: tuple[int, ...] = ()


def frame_of(payload: bytes, *, has_indexes: bool = False) -> Frame:
    """Read the frame of a payload.

    Args:
        payload: A key or a value.
        has_indexes: Whether it is Protobuf.

    Raises:
        UndecodableError: It has none, or one that is cut off or newer.
    """
    if len(payload) < _ID_ENDS or payload[0] != 0:
        raise UndecodableError(_why_no_frame(payload))
    schema_id = int.from_bytes(payload[1:_ID_ENDS], "big")
    if not has_indexes:
        return Frame(schema_id, _ID_ENDS)
    indexes, starts_at = _indexes(payload)
    return Frame(schema_id, starts_at, indexes)


def _why_no_frame(payload: bytes) -> str:
    if not payload:
        return "it is empty, and has no magic byte and no schema id"
    if payload[0] == 1 and len(payload) >= _GUID_ENDS:
        return (
            "it begins with magic byte 1, the frame with the GUID of a schema, which is not "
            "supported: let the producer write schema ids"
        )
    if payload[0] != 0:
        return f"it begins with byte {payload[0]} and not with magic byte 0: no schema registry's"
    return f"it has {len(payload)} bytes, too few for a magic byte and a schema id"


def _indexes(payload: bytes) -> tuple[tuple[int, ...], int]:
    """The path to a message: a count and as many numbers; a count of 0 is short for the first."""
    count, at = _varint(payload, _ID_ENDS)
    if count == 0:
        return (0,), at
    if not 0 < count <= _MOST_INDEXES:
        msg = f"its message indexes are damaged: there cannot be {count}"
        raise UndecodableError(msg)
    found = []
    for _ in range(count):
        index, at = _varint(payload, at)
        found.append(index)
    return tuple(found), at


def _varint(payload: bytes, at: int) -> tuple[int, int]:
    """A number in Protobuf's zigzag form, and where it ends."""
    value = 0
    for shift, byte in enumerate(payload[at : at + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:  # noqa: PLR2004 - the bit that says that another byte follows
            return (value >> 1) ^ -(value & 1), at + shift + 1
    msg = "its message indexes are cut off"
    raise UndecodableError(msg)
