"""Decoders of a record's key or value.

The result for a payload is a value or the reason for a failure, never an error that ends the batch.
A `Decoder` is plain data without a login, so it can be pickled into a Spark plan; `open` prepares
it for decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.core.model.printable import escaped
from dagster_rebalance.decoding import avro_payload as avro
from dagster_rebalance.decoding import json_schema, protobuf
from dagster_rebalance.decoding.wire_format import GUID_HEADERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dagster_rebalance.decoding.columns import Column, DecodeMany
    from dagster_rebalance.decoding.wire_format import SchemaText
Format = Literal["avro", "protobuf", "json", "plain_json"]

MAX_REASON_CHARACTERS = 2_000


def reason_text(part: str, problem: object) -> str:
    """Return the reason for an undecodable part, limited in length and printable."""
    return escaped(f"{part}: {problem}"[:MAX_REASON_CHARACTERS])[:MAX_REASON_CHARACTERS]


@dataclass(frozen=True)
class KnownSchemas:
    """The writers' schemas of a batch by id, and the reasons for missing schemas."""

    by_id: Mapping[int, SchemaText] = field(default_factory=dict)
    problems: Mapping[int, str] = field(default_factory=dict)

    def __call__(self, schema_id: int) -> SchemaText:
        """Return the schema with an id; raise UndecodableError if it is missing."""
        if schema_id in self.by_id:
            return self.by_id[schema_id]
        msg = self.problems.get(schema_id, f"its schema {schema_id} was not fetched")
        raise UndecodableError(msg)


@dataclass(frozen=True)
class Decoder:
    """Decoder of one part of a record by the reader's schema, which defines the column.

    `writer` returns the schema with an id. `message` is the full name of a Protobuf message; empty
    means the first message.
    """

    part: Literal["key", "value"]
    format: Format
    schema: SchemaText
    writer: Callable[[int], SchemaText]
    message: str = ""

    def open(self, *, as_python: bool = False) -> OpenDecoder:
        """Return a decoder that is ready; raise UndecodableError if the schema is invalid.

        With `as_python`, the decoder returns the Python values of the format's library instead of
        Arrow values.
        """
        decode_many: DecodeMany | None = None
        if self.format == "avro":
            column, decode, decode_many = avro.open_reader(
                self.schema, self.writer, as_python=as_python
            )
        elif self.format == "protobuf":
            column, decode, decode_many = protobuf.open_reader(
                self.schema, self.writer, self.message
            )
        else:
            writer = None if self.format == "plain_json" else self.writer
            column, decode, decode_many = json_schema.open_reader(
                self.schema, writer, as_python=as_python
            )
        guid_header = "" if self.format == "plain_json" else GUID_HEADERS[self.part]
        # Only the column of JSON checks values by the reader's schema.
        is_unconverted = as_python and self.format in {"avro", "protobuf"}
        convert = None if is_unconverted else column.convert
        return OpenDecoder(self.part, column, decode_many, decode, convert, guid_header)


@dataclass(frozen=True)
class OpenDecoder:
    """A decoder that is ready for payloads of `part` and returns values of `column`.

    `decode_many` decodes payloads with the same schema id into an array, and returns it with the
    rows that have to be decoded one by one. It returns None, or raises an error, if these are all.
    """

    part: str
    column: Column
    decode_many: DecodeMany | None
    _decode: Callable[[bytes], Any]
    _convert: Callable[[Any], Any] | None
    _guid_header: str

    @property
    def is_framed(self) -> bool:
        """Whether payloads begin with the id of a schema."""
        return bool(self._guid_header)

    def has_guid(self, header_names: Iterable[str]) -> bool:
        """Whether a header identifies the schema of a payload."""
        return bool(self._guid_header) and self._guid_header in header_names

    def __call__(self, payload: bytes | None, header_names: Iterable[str] = ()) -> Any:
        """Return the value of a payload, None for a tombstone; may raise UndecodableError."""
        if payload is None:
            return None
        if self.has_guid(header_names):
            msg = (
                f"its schema is identified by a GUID in the header {self._guid_header}, which is "
                "not supported: configure the producer to write schema ids"
            )
            raise UndecodableError(msg)
        value = self._decode(payload)
        if self._convert is None or value is None:
            return value
        try:
            return self._convert(value)
        except UndecodableError:
            raise
        except Exception as problem:
            msg = f"it does not fit its column: {type(problem).__name__} {problem}"
            raise UndecodableError(msg) from problem

    def try_decode(
        self, payload: bytes | None, header_names: Iterable[str] = ()
    ) -> tuple[Any, str | None]:
        """Return a value and None, or None and the reason. `MemoryError` is raised."""
        try:
            return self(payload, header_names), None
        except UndecodableError as problem:
            if isinstance(problem.__cause__, MemoryError):
                raise problem.__cause__ from None
            return None, reason_text(self.part, problem)
