"""The records of dead letters as text: decoded by a schema registry, or their bytes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.core.model.printable import escaped
from dagster_rebalance.decoding.decoder import Decoder
from dagster_rebalance.decoding.wire_format import parse_frame

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.decoding.decoder import Format
    from dagster_rebalance.decoding.wire_format import SchemaType
    from dagster_rebalance.kafka.schema_registry import Registry

_FORMATS: tuple[tuple[SchemaType, Format], ...] = (
    ("AVRO", "avro"),
    ("PROTOBUF", "protobuf"),
    ("JSON", "json"),
)
_SHOWN_BYTES = 4_000


def shown_payload(payload: bytes | None) -> str:
    """Return a key or value for a terminal: text as text, other bytes as hexadecimal numbers.

    Bytes with a zero are no text: they may be framed with the id of a schema.
    """
    if payload is None:
        return "null"
    if b"\0" not in payload:
        with suppress(UnicodeDecodeError):
            payload.decode()
            text = payload[:_SHOWN_BYTES].decode(errors="ignore")
            return escaped(text) + _more(len(payload) - len(text.encode()))
    return payload[:_SHOWN_BYTES].hex(" ") + _more(len(payload) - _SHOWN_BYTES)


def _more(left: int) -> str:
    return f" ... and {left} more bytes" if left > 0 else ""


def decoded_payload(
    registry: Registry,
    part: Literal["key", "value"],
    payload: bytes | None,
    topic: str,
    header_names: Iterable[str] = (),
) -> tuple[Any, str]:
    """Return a payload decoded by the schema that it names, or the reason for a failure.

    Raises:
        BrokerError: The registry did not answer.
    """
    if payload is None:
        return None, ""
    try:
        schema_id, subject = parse_frame(payload).schema_id, f"{topic}-{part}"
        kind, name = _format_of(registry, schema_id, subject)
        decoder = Decoder(
            part,
            name,
            registry.by_id(kind, schema_id, subject),
            lambda of: registry.by_id(kind, of, subject),
        )
        # A message of Protobuf is no JSON; the values of its column are.
        opened = decoder.open(as_python=name != "protobuf")
        return opened(payload, header_names), ""
    except UndecodableError as problem:
        return None, escaped(str(problem))


def _format_of(registry: Registry, schema_id: int, subject: str) -> tuple[SchemaType, Format]:
    *others, last = _FORMATS
    for kind, name in others:
        with suppress(UndecodableError):
            registry.by_id(kind, schema_id, subject)
            return kind, name
    return last
