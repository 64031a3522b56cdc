"""Decoding of Avro payloads with the writer's and the reader's schema."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding.avro import logical_types
from dagster_rebalance.decoding.avro.column_mapping import column_of
from dagster_rebalance.decoding.avro.resolution import resolve
from dagster_rebalance.decoding.avro.schema_tree import (
    branches_of,
    describe,
    parse,
    type_of,
    unusable_schema,
)
from dagster_rebalance.decoding.avro.size import SizeCheck
from dagster_rebalance.decoding.wire_format import parse_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dagster_rebalance.decoding.avro.resolution import Defaults
    from dagster_rebalance.decoding.avro.schema_tree import AvroSchema
    from dagster_rebalance.decoding.columns import Column
    from dagster_rebalance.decoding.wire_format import SchemaText


def open_reader(
    schema: SchemaText, writer: Callable[[int], SchemaText], *, as_python: bool = False
) -> tuple[Column, Callable[[bytes], Any]]:
    """Return the column of the reader's schema, and a function that decodes.

    Args:
        schema: The reader's schema.
        writer: Finds the schema with an id.
        as_python: Return values without the numbers of their union branches.

    Raises:
        UndecodableError: The reader's schema is invalid.
    """
    logical_types.register()
    reader = parse(schema)
    with unusable_schema():
        column = column_of(reader.root, reader.names)
        defaults = _decode_defaults(reader.names, with_branches=not as_python)
    plans: dict[int, _ReadPlan] = {}

    def decode(payload: bytes) -> Any:
        frame = parse_frame(payload)
        if frame.schema_id not in plans:
            text = writer(frame.schema_id)
            written = reader if text == schema else parse(text)
            with unusable_schema():
                plans[frame.schema_id] = _ReadPlan.of(
                    written, reader, defaults, with_branches=not as_python
                )
        return plans[frame.schema_id].read(payload, frame.schema_id, frame.starts_at)

    return column, decode


@dataclass(frozen=True)
class _ReadPlan:
    """How to read the payloads of one writer's schema.

    Attributes:
        writer: The writer's schema for fastavro.
        reader: The reader's schema for fastavro; None if it is the same.
        is_wrapped: Whether the value is the field of a record around it.
        check_size: Checks payloads first; None if their size is bounded.
        shares_defaults: Whether values may share a list or a dict.
    """

    writer: Any
    reader: Any
    is_wrapped: bool
    check_size: SizeCheck | None
    shares_defaults: bool

    @classmethod
    def of(
        cls, writer: AvroSchema, reader: AvroSchema, defaults: Defaults, *, with_branches: bool
    ) -> _ReadPlan:
        for_writer, for_reader, is_wrapped = resolve(
            writer, reader, defaults, with_branches=with_branches
        )
        check = SizeCheck(writer)
        shares_defaults = for_reader is not None and any(
            isinstance(one, (dict, list)) for one in defaults.values()
        )
        check_size = check if check.is_needed() else None
        return cls(for_writer, for_reader, is_wrapped, check_size, shares_defaults)

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


def _deep_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _deep_copy(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_deep_copy, value))
    return value


def _decode_defaults(names: Mapping[str, Any], *, with_branches: bool) -> Defaults:
    """Decode the reader's defaults; fastavro would return them as JSON has them."""
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
    logical = logical_types.exact(schema).get("logicalType") if isinstance(schema, dict) else None
    read = LOGICAL_READERS.get(f"{kind}-{logical}")
    return value if read is None else read(value, schema, None)


def _may_be(branch: Any, value: Any, names: Mapping[str, Any]) -> bool:
    """Whether a default in JSON may be of a branch."""
    kind = type_of(names.get(branch, branch) if isinstance(branch, str) else branch)
    if value is None or kind == "null":
        return value is None and kind == "null"
    json_types = {bool: ("boolean",), list: ("array",), dict: ("record", "error", "map")}
    json_types |= {str: ("string", "bytes", "fixed", "enum"), float: ("float", "double")}
    json_types |= {int: ("int", "long", "float", "double")}
    return kind in json_types[type(value)]
