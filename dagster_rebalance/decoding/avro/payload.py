"""Avro: how a payload is read into the columns of a schema.

Owns which schema reads which payload, with the reader's defaults and with all that both refer to.
"""

from __future__ import annotations

import io
import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding.avro.columns import branches_of, column_of, type_of
from dagster_rebalance.decoding.avro.logical_types import (
    check_precision,
    exact,
    without_invalid_decimal,
)
from dagster_rebalance.decoding.avro.named_types import NAMED, names_of
from dagster_rebalance.decoding.avro.resolution import register, resolved
from dagster_rebalance.decoding.avro.size import SizeCheck
from dagster_rebalance.decoding.wire_format import frame_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dagster_rebalance.decoding.avro.resolution import Defaults
    from dagster_rebalance.decoding.columns import Column
    from dagster_rebalance.decoding.schema import SchemaText


@contextmanager
def _what_is_wrong_with_a_schema() -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        msg = f"not an Avro schema that can be used: {_said(problem)}"
        raise UndecodableError(msg) from problem


def parsed(schema: SchemaText) -> Any:
    """A schema with the types that it refers to, as fastavro takes it.

    Raises:
        UndecodableError: It is no schema, or refers to what is not there.
    """
    import fastavro

    named: dict[str, Any] = {}
    with _what_is_wrong_with_a_schema():
        for _, text in schema.references:
            fastavro.parse_schema(_loaded(text), named_schemas=named)
        root = fastavro.parse_schema(_loaded(schema.text), named_schemas=named)
        if schema.references:
            root = fastavro.parse_schema(_whole(root, named, set()))
        check_precision(root)
        return root


def reader(
    schema: SchemaText, writer: Callable[[int], SchemaText], *, as_python: bool = False
) -> tuple[Column, Callable[[bytes], Any]]:
    """The column of a schema, and what decodes a payload into it.

    Args:
        schema: The reader's.
        writer: Finds the schema with an id.
        as_python: Whether the values are for people: without the branches that they are of.

    Raises:
        UndecodableError: The schema cannot be used.
    """
    import fastavro

    register()
    wanted = parsed(schema)
    with _what_is_wrong_with_a_schema():
        names = names_of(wanted)
        column = column_of(wanted, names)
        defaults = _defaults(names, with_branches=not as_python)
    writers: dict[int, _Writer] = {}

    def decode(payload: bytes) -> Any:
        frame = frame_of(payload)
        if frame.schema_id not in writers:
            text = writer(frame.schema_id)
            written = wanted if text == schema else parsed(text)
            with _what_is_wrong_with_a_schema():
                writers[frame.schema_id] = _Writer.of(
                    written, wanted, defaults, with_branches=not as_python
                )
        its = writers[frame.schema_id]
        if its.check_size is not None:
            its.check_size(payload, frame.starts_at)
        data = io.BytesIO(payload)
        data.seek(frame.starts_at)
        try:
            read: Any = fastavro.schemaless_reader(data, its.schema, its.asked)
        except Exception as problem:
            msg = f"it does not fit schema {frame.schema_id}: {_said(problem)}"
            raise UndecodableError(msg) from problem
        if (left := len(payload) - data.tell()) > 0:
            msg = f"it does not fit schema {frame.schema_id}: {left} bytes are left over"
            raise UndecodableError(msg)
        value = read["value"] if its.is_around else read
        return _copied(value) if its.shares_defaults else value

    return column, decode


@dataclass(frozen=True)
class _Writer:
    """How the records that one schema has written are read.

    Attributes:
        schema: The writer's, as fastavro gets it.
        asked: The reader's in the same form; None if it is the same.
        is_around: Whether the value is the field of a record around it.
        check_size: Looks at its payloads before, if that is needed.
        shares_defaults: Whether values may have a list or a dict in common.
    """

    schema: Any
    asked: Any
    is_around: bool
    check_size: SizeCheck | None
    shares_defaults: bool

    @classmethod
    def of(cls, written: Any, wanted: Any, defaults: Defaults, *, with_branches: bool) -> _Writer:
        """What a writer's schema needs."""
        schema, asked, is_around = resolved(written, wanted, defaults, with_branches=with_branches)
        size = SizeCheck(written, names_of(written))
        shares_defaults = any(isinstance(one, (dict, list)) for one in defaults.values())
        check_size = size if size.is_needed() else None
        return cls(schema, asked, is_around, check_size, shares_defaults and asked is not None)


def _loaded(text: str) -> Any:
    return json.loads(text, object_hook=without_invalid_decimal)


def _whole(schema: Any, named: Mapping[str, Any], seen: set[str]) -> Any:
    """A schema with each type that it names written out where it is named first.

    Args:
        schema: The schema.
        named: The types that it may name.
        seen: Those that are written out already.
    """
    if isinstance(schema, list):
        return [_whole(branch, named, seen) for branch in schema]
    if isinstance(schema, str):
        if schema not in named:
            return schema
        return schema if schema in seen else _whole(named[schema], named, seen)
    if schema["type"] in NAMED and schema["name"] in seen:
        return schema["name"]
    seen.add(schema.get("name", ""))
    found = {name: value for name, value in schema.items() if not name.startswith("__")}
    if "." not in found.get("name", "."):
        found["namespace"] = ""  # not that of the record that it stands in
    for inner in ("items", "values", "type"):
        if inner in found:
            found[inner] = _whole(found[inner], named, seen)
    if "fields" in found:
        found["fields"] = [
            {**field, "type": _whole(field["type"], named, seen)} for field in found["fields"]
        ]
    return found


def _copied(value: Any) -> Any:
    """A value with lists and dicts of its own."""
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    return value


def _said(problem: Exception) -> str:
    return f"{type(problem).__name__} {str(problem)[:500]}".strip()


def _defaults(names: Mapping[str, Any], *, with_branches: bool) -> Defaults:
    """The defaults of the reader's schema as values: fastavro takes them as JSON has them."""
    return {
        (name, field["name"]): _default(
            field["type"], field["default"], names, with_branches=with_branches
        )
        for name, record in names.items()
        for field in record.get("fields", ())
        if "default" in field
    }


def _default(schema: Any, value: Any, names: Mapping[str, Any], *, with_branches: bool) -> Any:
    """A default of a schema, as if it had been read."""
    from fastavro.read import LOGICAL_READERS

    def inner(of: Any, one: Any) -> Any:
        return _default(of, one, names, with_branches=with_branches)

    if isinstance(schema, list):
        branch = next(one for one in schema if _may_be(one, value, names))
        found, of_several = inner(branch, value), branches_of(schema)
        is_named = (branch if isinstance(branch, str) else branch.get("name")) in names
        is_pair = with_branches and is_named and len(of_several) > 1
        return (of_several.index(branch), found) if is_pair else found
    if isinstance(schema, str) and schema in names:
        return inner(names[schema], value)
    kind = type_of(schema)
    if kind in {"bytes", "fixed"}:
        value = value.encode("latin-1")
    elif kind in {"float", "double"}:
        value = float(value)
    elif kind in {"record", "error"}:
        return {
            field["name"]: inner(field["type"], value.get(field["name"], field.get("default")))
            for field in schema["fields"]
        }
    elif kind == "array":
        return [inner(schema["items"], one) for one in value]
    elif kind == "map":
        return {name: inner(schema["values"], one) for name, one in value.items()}
    logical = exact(schema).get("logicalType") if isinstance(schema, dict) else None
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
