"""Decoding of Avro payloads with the writer's and the reader's schema, and the bounds of payloads.

fastavro reads recursively in C without a depth limit: a payload of a few thousand levels overflows
the stack and kills the process. It also has no limit for items without bytes, of which a payload of
12 bytes may contain any number: in an array, or in records that double with each level.
`SizeCheck` refuses both kinds of payloads before fastavro reads them.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding.avro_columns import column_of
from dagster_rebalance.decoding.avro_schemas import (
    branches_of,
    describe,
    exact,
    parse,
    parts_of,
    register_exact_readers,
    resolve,
    resolve_many,
    type_of,
    unusable_schema,
)
from dagster_rebalance.decoding.avro_vectors import UnsupportedError, VectorReader
from dagster_rebalance.decoding.wire_format import parse_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dagster_rebalance.decoding.avro_schemas import AvroSchema, Defaults
    from dagster_rebalance.decoding.columns import Column, DecodeMany
    from dagster_rebalance.decoding.wire_format import SchemaText

_MAX_LEVELS = 100
"""Nested records; Protobuf's limit for messages."""
_MAX_EMPTY_ITEMS = 10_000
"""Items without bytes in one payload."""
_MAX_VARINT_BYTES = 10
_TOO_DEEP = f"it nests more than {_MAX_LEVELS} records in each other"
_TRUNCATED = "it is truncated, or has a branch that its schema does not have"
_MARK_BYTES = 8
_TOGETHER = 500
"""Payloads that fastavro reads in one call. If one is damaged, all are decoded again."""
_BYTES_TOGETHER = 8 << 20
"""Bytes of payloads that are read by column in one call, which needs some times as much memory."""
_FIXED_SIZES = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_NUMBERS = {"int", "long", "enum"}
_LENGTH_PREFIXED = {"bytes", "string"}


def open_reader(
    schema: SchemaText, writer: Callable[[int], SchemaText], *, as_python: bool = False
) -> tuple[Column, Callable[[bytes], Any], DecodeMany | None]:
    """Return the column of the reader's schema, a function that decodes, and one for columns.

    The latter decodes payloads with the same schema id into an array, and returns it with the rows
    that have to be decoded by the first function. It returns None, or raises an error, if these are
    all. With `as_python`, there is no such function, and values do not
    include the numbers of their union branches.
    """
    register_exact_readers()
    reader = parse(schema)
    with unusable_schema():
        column = column_of(reader.root, reader.names)
        defaults = _decode_defaults(reader.names, with_branches=not as_python)
    plans: dict[int, _ReadPlan] = {}

    def plan(schema_id: int) -> _ReadPlan:
        if schema_id not in plans:
            text = writer(schema_id)
            written = reader if text == schema else parse(text)
            with unusable_schema():
                plans[schema_id] = _ReadPlan.of(
                    written, reader, defaults, None if as_python else column
                )
        return plans[schema_id]

    def decode(payload: bytes) -> Any:
        frame = parse_frame(payload)
        return plan(frame.schema_id).read(payload, frame.schema_id, frame.starts_at)

    def decode_many(payloads: Any) -> tuple[Any, list[int]] | None:
        frame = parse_frame(payloads[0].as_py())
        many = plan(frame.schema_id).many
        return None if many is None else many.read(payloads, frame.starts_at)

    return column, decode, None if as_python else decode_many


@dataclass(frozen=True)
class _ReadPlan:
    """Plan for reading the payloads of one writer's schema.

    `reader` is None if both schemas are the same. If `is_wrapped`, the value is a field of an extra
    record. If `shares_defaults`, values may share a list or a dict.
    """

    writer: Any
    reader: Any
    is_wrapped: bool
    check_size: SizeCheck | None
    shares_defaults: bool
    many: _ReadMany | None

    @classmethod
    def of(
        cls, writer: AvroSchema, reader: AvroSchema, defaults: Defaults, column: Column | None
    ) -> _ReadPlan:
        for_writer, for_reader, is_wrapped = resolve(
            writer, reader, defaults, with_branches=column is not None
        )
        check = SizeCheck(writer)
        shares_defaults = for_reader is not None and any(
            isinstance(one, (dict, list)) for one in defaults.values()
        )
        check_size = check if check.is_needed() else None
        many = None
        if column is not None and check_size is None and not SizeCheck(reader).is_needed():
            many = _ReadMany.of(writer, reader, defaults, column)
        return cls(for_writer, for_reader, is_wrapped, check_size, shares_defaults, many)

    def read(self, payload: bytes, schema_id: int, starts_at: int) -> Any:
        import fastavro

        if self.check_size is not None:
            self.check_size(payload, starts_at)
        data = io.BytesIO(payload)
        data.seek(starts_at)
        try:
            value: Any = fastavro.schemaless_reader(data, self.writer, self.reader)
        except Exception as problem:
            msg = f"it does not fit schema {schema_id}: {describe(problem)}"
            raise UndecodableError(msg) from problem
        if (left := len(payload) - data.tell()) > 0:
            msg = f"it does not fit schema {schema_id}: {left} bytes are left over"
            raise UndecodableError(msg)
        if self.is_wrapped:
            value = value["value"]
        return _deep_copy(value) if self.shares_defaults else value


@dataclass(frozen=True)
class _ReadMany:
    """Plan for reading many payloads of one writer's schema into an array.

    Without `vectors`, fastavro reads up to 500 payloads in one call, as an array in which each is
    followed by random bytes. If a payload is truncated or has more bytes than its value, the marks
    are not where they have to be: a value that takes a mark, and even the next payloads with it,
    leaves too few marks for its successors.
    """

    writer: Any
    reader: Any
    mark: bytes
    column: Column
    vectors: VectorReader | None

    @classmethod
    def of(
        cls, writer: AvroSchema, reader: AvroSchema, defaults: Defaults, column: Column
    ) -> _ReadMany:
        pair, (for_writer, for_reader) = resolve_many(writer, reader, defaults, _MARK_BYTES)
        try:
            vectors = VectorReader(pair, column)
        except (UnsupportedError, ImportError):
            vectors = None
        return cls(for_writer, for_reader, os.urandom(_MARK_BYTES), column, vectors)

    def read(self, payloads: Any, starts_at: int) -> tuple[Any, list[int]]:
        """Return the values of a binary array, and its rows that have to be decoded otherwise."""
        import pyarrow as pa
        import pyarrow.compute as pc

        size = _TOGETHER
        if self.vectors is not None:
            length = pc.sum(pc.binary_length(payloads)).as_py()
            size = max(1, len(payloads) * _BYTES_TOGETHER // length)
        arrays: list[Any] = []
        doubtful: list[int] = []
        for first in range(0, len(payloads), size):
            array, rows = self._read_chunk(payloads.slice(first, size), starts_at)
            arrays.append(array)
            doubtful += [first + row for row in rows]
        return (arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)), doubtful

    def _read_chunk(self, chunk: Any, starts_at: int) -> tuple[Any, Sequence[int]]:
        import pyarrow as pa

        try:
            if self.vectors is not None:
                return self.vectors.read(chunk, starts_at)
            values = self._read([one[starts_at:] for one in chunk.to_pylist()])
            return self.column.array_of(values), ()
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - the other decoder finds the reason
            return pa.nulls(len(chunk), self.column.arrow()), range(len(chunk))

    def _read(self, payloads: Sequence[bytes]) -> list[Any]:
        """Return the values of payloads without frames; raise an error if one is damaged."""
        import fastavro

        data = b"".join([_varint(len(payloads)), self.mark.join([*payloads, b""]), b"\0"])
        file = io.BytesIO(data)
        rows: Any = fastavro.schemaless_reader(file, self.writer, self.reader)
        marks = [row["end"] for row in rows].count(self.mark)
        if file.tell() != len(data) or marks != len(payloads):
            msg = "a payload does not end with its value"
            raise ValueError(msg)
        return [row["value"] for row in rows]


def _varint(count: int) -> bytes:
    left, encoded = count << 1, bytearray()
    while left >= 0x80:  # noqa: PLR2004 - the continuation bit
        encoded.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*encoded, left])


def _deep_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _deep_copy(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_deep_copy, value))
    return value


def _decode_defaults(names: Mapping[str, Any], *, with_branches: bool) -> Defaults:
    """Decode the reader's defaults, because fastavro would return their JSON values."""
    return {
        (name, field["name"]): _decode_default(
            field["type"], field["default"], names, with_branches=with_branches
        )
        for name, record in names.items()
        for field in record.get("fields", ())
        if "default" in field
    }


def _decode_default(
    schema: Any, value: Any, names: Mapping[str, Any], *, with_branches: bool
) -> Any:
    from fastavro.read import LOGICAL_READERS

    def decode(inner: Any, one: Any) -> Any:
        return _decode_default(inner, one, names, with_branches=with_branches)

    if isinstance(schema, list):
        branch = next(one for one in schema if _may_be(one, value, names))
        decoded, branches = decode(branch, value), branches_of(schema)
        is_named = (branch if isinstance(branch, str) else branch.get("name")) in names
        is_pair = with_branches and is_named and len(branches) > 1
        return (branches.index(branch), decoded) if is_pair else decoded
    if isinstance(schema, str) and schema in names:
        return decode(names[schema], value)
    kind = type_of(schema)
    if kind in {"bytes", "fixed"}:
        value = value.encode("latin-1")
    elif kind in {"float", "double"}:
        value = float(value)
    elif kind in {"record", "error"}:
        return {
            field["name"]: decode(field["type"], value.get(field["name"], field.get("default")))
            for field in schema["fields"]
        }
    elif kind == "array":
        return [decode(schema["items"], one) for one in value]
    elif kind == "map":
        return {name: decode(schema["values"], one) for name, one in value.items()}
    logical = exact(schema).get("logicalType") if isinstance(schema, dict) else None
    read = LOGICAL_READERS.get(f"{kind}-{logical}")
    return value if read is None else read(value, schema, None)


def _may_be(branch: Any, value: Any, names: Mapping[str, Any]) -> bool:
    """Return whether a default in JSON may belong to a branch."""
    kind = type_of(names.get(branch, branch) if isinstance(branch, str) else branch)
    if value is None or kind == "null":
        return value is None and kind == "null"
    json_types = {bool: ("boolean",), list: ("array",), dict: ("record", "error", "map")}
    json_types |= {str: ("string", "bytes", "fixed", "enum"), float: ("float", "double")}
    json_types |= {int: ("int", "long", "float", "double")}
    return kind in json_types[type(value)]


class SizeCheck:
    """Checks payloads of a writer's schema before fastavro reads them.

    The bounds of each part are computed once, because a type may be referenced in many places.
    """

    def __init__(self, schema: AvroSchema) -> None:
        self._schema = schema
        self._levels: dict[str | int, float] = {}
        self._empty_items: dict[str | int, int] = {}

    def is_needed(self) -> bool:
        """Whether the schema leaves the depth or the items of a payload unbounded."""
        return self._levels_of(self._schema.root) > _MAX_LEVELS or any(
            self._empty_items_of(inner)
            for part in self._schema.parts
            if isinstance(part, dict)
            for inner in parts_of(part)
        )

    def __call__(self, payload: bytes, starts_at: int) -> None:
        """Refuse a payload beyond the bounds; fastavro reports all other defects."""
        try:
            _Walk(payload, starts_at, self._schema.names, self._empty_items_of).pass_over(
                self._schema.root, 0
            )
        except IndexError:
            # fastavro refuses it, unless the schema is recursive: it may read a boolean after the
            # end of the payload again and again, and end the process.
            if self._levels_of(self._schema.root) == inf:
                raise UndecodableError(_TRUNCATED) from None
        except RecursionError:
            raise UndecodableError(_TOO_DEEP) from None

    def _levels_of(self, schema: Any) -> float:
        """Return the depth of a schema, infinite if it is recursive."""
        key = _key(schema)
        if key not in self._levels:
            self._levels[key] = inf  # for a recursive schema
            named = self._schema.names.get(schema) if isinstance(schema, str) else None
            parts = parts_of(schema) if named is None else [named]
            self._levels[key] = 1 + max(map(self._levels_of, parts), default=0)
        return self._levels[key]

    def _empty_items_of(self, schema: Any) -> int:
        """Return the number of values in a part that has no bytes, including the part; else 0."""
        key = _key(schema)
        if key not in self._empty_items:
            self._empty_items[key] = 0  # for a recursive schema, no value of which is empty
            self._empty_items[key] = self._count_empty_items(schema)
        return self._empty_items[key]

    def _count_empty_items(self, schema: Any) -> int:
        if isinstance(schema, list):
            return 0
        if isinstance(schema, str) and schema in self._schema.names:
            return self._empty_items_of(self._schema.names[schema])
        if isinstance(schema, dict) and "fields" in schema:
            counts = [self._empty_items_of(field["type"]) for field in schema["fields"]]
            return 1 + sum(counts) if all(counts) else 0
        kind = type_of(schema)
        return int(kind == "null" or (kind == "fixed" and schema["size"] == 0))


def _key(schema: Any) -> str | int:
    return schema if isinstance(schema, str) else id(schema)


class _Walk:
    """Skips the data of a payload; reads only lengths, counts and branches."""

    def __init__(
        self,
        payload: bytes,
        at: int,
        names: Mapping[str, Any],
        empty_items_of: Callable[[Any], int],
    ) -> None:
        self._payload = payload
        self._at = at
        self._names = names
        self._empty_items_of = empty_items_of
        self._empty_items = 0

    def pass_over(self, schema: Any, level: int) -> None:
        """Skip a part that is `level` records deep."""
        while not isinstance(schema, dict):
            if isinstance(schema, list):
                schema = schema[self._read_number()]
            elif schema in self._names:
                schema = self._names[schema]
            else:
                break
        kind = type_of(schema)
        if kind in _FIXED_SIZES:
            self._skip(_FIXED_SIZES[kind])
        elif kind in _NUMBERS:
            self._read_number()
        elif kind in _LENGTH_PREFIXED:
            self._skip(self._read_number())
        elif kind == "fixed":
            self._skip(schema["size"])
        elif kind == "array":
            self._pass_over_blocks(schema["items"], level, has_keys=False)
        elif kind == "map":
            self._pass_over_blocks(schema["values"], level, has_keys=True)
        else:
            self._pass_over_record(schema, level)

    def _pass_over_record(self, schema: Any, level: int) -> None:
        if level == _MAX_LEVELS:
            raise UndecodableError(_TOO_DEEP)
        for field in schema["fields"]:
            if empty_items := self._empty_items_of(field["type"]):
                self._count(empty_items)
            else:
                self.pass_over(field["type"], level + 1)

    def _pass_over_blocks(self, inner: Any, level: int, *, has_keys: bool) -> None:
        empty_items = 0 if has_keys else self._empty_items_of(inner)
        while count := self._read_number():
            if count < 0:
                self._read_number()  # the size of the block in bytes
            if empty_items:
                self._count(abs(count) * empty_items)
                continue
            for _ in range(abs(count)):
                if has_keys:
                    self._skip(self._read_number())
                self.pass_over(inner, level)

    def _count(self, empty_items: int) -> None:
        self._empty_items += empty_items
        # A large payload may contain some beside each of its other values.
        if self._empty_items > max(_MAX_EMPTY_ITEMS, len(self._payload)):
            msg = f"it has more than {_MAX_EMPTY_ITEMS} items that take no byte"
            raise UndecodableError(msg)

    def _skip(self, length: int) -> None:
        if not 0 <= length <= len(self._payload) - self._at:
            raise IndexError
        self._at += length

    def _read_number(self) -> int:
        value = 0
        for place in range(_MAX_VARINT_BYTES):
            byte = self._payload[self._at]
            self._at += 1
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:  # noqa: PLR2004 - the continuation bit
                return (value >> 1) ^ -(value & 1)
        msg = f"it has a number of more than {_MAX_VARINT_BYTES} bytes"
        raise UndecodableError(msg)
