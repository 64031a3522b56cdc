"""A decoder: how one part of a record, its key or its value, becomes a column.

Owns that a payload gives a value or a reason, never an error that ends all others. It is plain data
until it is opened, so that it travels to Spark's executors; no login is in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.core.model.printable import shown
from dagster_rebalance.decoding import json_schema, protobuf
from dagster_rebalance.decoding.avro import payload as avro
from dagster_rebalance.decoding.wire_format import GUID_HEADERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dagster_rebalance.decoding.columns import Column
    from dagster_rebalance.decoding.schema import SchemaText

Format = Literal["avro", "protobuf", "json", "plain_json"]


_MOST_REASON_CHARACTERS = 2_000


def reason(part: str, problem: object) -> str:
    """Why a part could not be decoded, as a text that can be stored.

    What it cites of a payload may be very long, and have any characters.
    """
    return shown(f"{part}: {problem}"[:_MOST_REASON_CHARACTERS])[:_MOST_REASON_CHARACTERS]


@dataclass(frozen=True)
class KnownSchemas:
    """The schemas by which a batch was written: all that its payloads name and the registry has.

    Attributes:
        by_id: The schemas.
        problems: Why there is none for other ids.
    """

    by_id: Mapping[int, SchemaText] = field(default_factory=dict)
    problems: Mapping[int, str] = field(default_factory=dict)

    def __call__(self, schema_id: int) -> SchemaText:
        """The schema with an id.

        Raises:
            UndecodableError: The registry has none.
        """
        if schema_id in self.by_id:
            return self.by_id[schema_id]
        msg = self.problems.get(schema_id, f"nobody has looked for its schema {schema_id}")
        raise UndecodableError(msg)


@dataclass(frozen=True)
class Decoder:
    """How a part of a record is decoded.

    Attributes:
        part: key or value.
        format: Of the payloads.
        schema: The reader's: what the column is made of.
        writer: Finds the schema with an id.
        message: Protobuf: the full name of the message, or nothing for the first.
    """

    part: Literal["key", "value"]
    format: Format
    schema: SchemaText
    writer: Callable[[int], SchemaText]
    message: str = ""

    def open(self, *, as_python: bool = False) -> OpenDecoder:
        """What decodes.

        Args:
            as_python: Whether the values are Python's own, as the library of the format gives
                them, and not for Arrow.

        Raises:
            UndecodableError: The reader's schema cannot be used.
        """
        if self.format == "avro":
            column, decode = avro.reader(self.schema, self.writer, as_python=as_python)
        elif self.format == "protobuf":
            column, decode = protobuf.reader(self.schema, self.writer, self.message)
        else:
            writer = None if self.format == "plain_json" else self.writer
            column, decode = json_schema.reader(self.schema, writer, as_python=as_python)
        header = "" if self.format == "plain_json" else GUID_HEADERS[self.part]
        # Of JSON, the library knows nothing of the reader's schema: the column has its checks.
        is_as_read = as_python and self.format in {"avro", "protobuf"}
        convert = None if is_as_read else column.convert
        return OpenDecoder(self.part, column, decode, convert, header)


@dataclass(frozen=True)
class OpenDecoder:
    """Decodes payloads.

    Attributes:
        part: key or value.
        column: What they become.
    """

    part: str
    column: Column
    _decode: Callable[[bytes], Any]
    _convert: Callable[[Any], Any] | None
    _guid_header: str

    def decoded(
        self, payload: bytes | None, header_names: Iterable[str] = ()
    ) -> tuple[Any, str | None]:
        """The value of a payload, and None; or None, and why there is none.

        Raises:
            MemoryError: It is no fault of the record: a second look may find memory.
        """
        try:
            return self(payload, header_names), None
        except UndecodableError as problem:
            if isinstance(problem.__cause__, MemoryError):
                raise problem.__cause__ from None
            return None, reason(self.part, problem)

    def decoded_of_each(
        self, payloads: Iterable[bytes | None], header_names: Iterable[Iterable[str]]
    ) -> tuple[list[Any], list[str | None]]:
        """The values of payloads, and for each why there is none, or None.

        Raises:
            MemoryError: As for one payload.
        """
        values: list[Any] = []
        reasons: list[str | None] = []
        for payload, names in zip(payloads, header_names, strict=True):
            try:
                value, why = self(payload, names), None
            except UndecodableError:
                value, why = self.decoded(payload, names)
            values.append(value)
            reasons.append(why)
        return values, reasons

    def __call__(self, payload: bytes | None, header_names: Iterable[str] = ()) -> Any:
        """The value of a payload. A tombstone has none.

        Args:
            payload: The key or the value of a record.
            header_names: Of the headers of the record.

        Raises:
            UndecodableError: It cannot be decoded.
        """
        if payload is None:
            return None
        if self._guid_header and self._guid_header in header_names:
            msg = (
                f"its schema is named by a GUID in the header {self._guid_header}, which is not "
                "supported: let the producer write schema ids"
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
