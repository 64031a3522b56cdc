"""Avro: how a payload is read into the columns of a schema.

Owns which schema stands for which: what a writer's schema has is resolved by fastavro into what the
reader's asks for, with its defaults and with all that both refer to.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.errors import UndecodableError
from dagster_rebalance.core.wire_format import frame_of
from dagster_rebalance.decoding.avro_columns import column_of, has_choices, parts_of, type_of
from dagster_rebalance.decoding.avro_decimals import EXACT_DECIMAL, register
from dagster_rebalance.decoding.avro_depth import check_depth, is_recursive
from dagster_rebalance.decoding.avro_names import as_simple_name, simple_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dagster_rebalance.core.schemas import SchemaText
    from dagster_rebalance.decoding.columns import Column

_NAMED = {"record", "error", "enum", "fixed"}


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
            fastavro.parse_schema(json.loads(text), named_schemas=named)
        root = fastavro.parse_schema(json.loads(schema.text), named_schemas=named)
        return fastavro.parse_schema(_whole(root, named, set())) if schema.references else root


def reader(
    schema: SchemaText, writer: Callable[[int], SchemaText], *, as_python: bool = False
) -> tuple[Column, Callable[[bytes], Any]]:
    """The column of a schema, and what decodes a payload into it.

    Args:
        schema: The reader's.
        writer: Finds the schema with an id.
        as_python: Whether the values are for people: without the names of their types in unions.

    Raises:
        UndecodableError: The schema cannot be used.
    """
    import fastavro

    register()
    wanted = parsed(schema)
    with _what_is_wrong_with_a_schema():
        column = column_of(wanted, _names_of(wanted))
        with_names = not as_python and has_choices(wanted)
        readers = _Readers(wanted, with_names=with_names)
    writers: dict[int, _Writer] = {}

    def decode(payload: bytes) -> Any:
        frame = frame_of(payload)
        if frame.schema_id not in writers:
            text = writer(frame.schema_id)
            written = parsed(text)
            with _what_is_wrong_with_a_schema():
                writers[frame.schema_id] = _Writer.of(
                    written, None if text == schema else readers.beside(_shared_names(written))
                )
        its = writers[frame.schema_id]
        if its.recursive_names is not None:
            check_depth(payload, frame.starts_at, its.schema, its.recursive_names)
        data = io.BytesIO(payload)
        data.seek(frame.starts_at)
        try:
            value = fastavro.schemaless_reader(
                data, its.schema, its.asked, return_named_type=with_names
            )
        except Exception as problem:
            msg = f"it does not fit schema {frame.schema_id}: {_said(problem)}"
            raise UndecodableError(msg) from problem
        if (left := len(payload) - data.tell()) > 0:
            msg = f"it does not fit schema {frame.schema_id}: {left} bytes are left over"
            raise UndecodableError(msg)
        if its.branch is not None and with_names:
            return its.branch, value
        return _copied(value) if its.shares_defaults else value

    return column, decode


@dataclass(frozen=True)
class _Reader:
    """The reader's schema, as fastavro is asked for it.

    Attributes:
        schema: With its defaults as values.
        branches: The named branches of a union, each as a schema of its own.
        shared: The simple names that say too little in it, or in the writer's.
        has_parts: Whether a default is a list or a dict, of which there is only one.
    """

    schema: Any
    branches: Mapping[str, Any]
    shared: frozenset[str]
    has_parts: bool

    @classmethod
    def of(cls, wanted: Any, shared: frozenset[str], *, with_names: bool) -> _Reader:
        """What is asked for where unions have several types with the names `shared`."""
        import fastavro

        schema = _rewritten(wanted, shared)
        names = _names_of(schema)
        branches = {
            name: fastavro.parse_schema(_whole(names[name], names, set()))
            for branch in (schema if isinstance(schema, list) else ())
            if (name := branch if isinstance(branch, str) else branch.get("name")) in names
        }
        for one in (schema, *branches.values()):
            _read_defaults(_names_of(one), with_names=with_names)
        has_parts = any(
            isinstance(field.get("default"), (dict, list))
            for record in names.values()
            for field in record.get("fields", ())
        )
        return cls(schema, branches, shared, has_parts)


class _Readers:
    """The reader's schema beside those of writers.

    Args:
        wanted: The schema, parsed.
        with_names: Whether its defaults have the names of their types in unions.
    """

    def __init__(self, wanted: Any, *, with_names: bool) -> None:
        self._wanted = wanted
        self._with_names = with_names
        self._shared = _shared_names(wanted)
        self._made: dict[frozenset[str], _Reader] = {}
        self.beside(frozenset())  # what is wrong with its defaults is said at once

    def beside(self, shared: frozenset[str]) -> _Reader:
        """The reader's schema beside a writer's with unions of several types with these names."""
        among = shared | self._shared
        if among not in self._made:
            self._made[among] = _Reader.of(self._wanted, among, with_names=self._with_names)
        return self._made[among]


@dataclass(frozen=True)
class _Writer:
    """How the records that one schema has written are read.

    Attributes:
        schema: The writer's.
        asked: The reader's; None if it is the same.
        branch: The branch of the reader's union that `asked` is.
        recursive_names: The named types of a schema with a record inside of itself; else None.
        shares_defaults: Whether values may have a list or a dict in common.
    """

    schema: Any
    asked: Any
    branch: str | None
    recursive_names: Mapping[str, Any] | None
    shares_defaults: bool

    @classmethod
    def of(cls, written: Any, reader: _Reader | None) -> _Writer:
        """What a writer's schema needs.

        A record without a union is read by its branch of a reader's union: fastavro finds that as
        well, but does not say which it was.
        """
        written = _rewritten(written, frozenset() if reader is None else reader.shared)
        names = _names_of(written)
        asked, branch = None if reader is None else reader.schema, None
        if reader is not None and isinstance(written, dict):
            branch = written.get("name") if written.get("name") in reader.branches else None
            asked = asked if branch is None else reader.branches[branch]
        recursive_names = names if is_recursive(written, names) else None
        shares_defaults = reader is not None and reader.has_parts
        return cls(written, asked, branch, recursive_names, shares_defaults)


def _shared_names(schema: Any) -> frozenset[str]:
    """The simple names that several branches of one union have, or had as an alias."""
    names = _names_of(schema)

    def shared(part: Any) -> set[str]:
        found = set().union(*map(shared, parts_of(part)))
        if isinstance(part, list):
            branches = [
                names.get(one if isinstance(one, str) else one.get("name"), {}) for one in part
            ]
            simple = Counter(
                name
                for branch in branches
                for name in {
                    simple_name(one) for one in (branch.get("name", ""), *branch.get("aliases", ()))
                }
            )
            found |= {name for name, count in simple.items() if name and count > 1}
        return found

    return frozenset(shared(schema))


def _rewritten(schema: Any, shared: frozenset[str]) -> Any:
    """A parsed schema with what fastavro would get wrong said in other words.

    Args:
        schema: The schema.
        shared: The simple names that say too little. fastavro takes the first branch of a reader's
            union with the simple name of the writer's.
    """
    import fastavro

    def change(part: Any) -> Any:
        if isinstance(part, str):
            return as_simple_name(part) if simple_name(part) in shared else part
        if part.get("logicalType") == "decimal":
            part["logicalType"] = EXACT_DECIMAL
        if "name" in part:
            space = part["name"].rpartition(".")[0]
            part["name"] = change(part["name"])
            part["aliases"] = [
                change(f"{space}.{alias}" if space and "." not in alias else alias)
                if simple_name(alias) in shared
                else alias
                for alias in part.get("aliases", ())
            ]
        return part

    return fastavro.parse_schema(_whole(schema, _names_of(schema), set(), change))


def _whole(
    schema: Any,
    named: Mapping[str, Any],
    seen: set[str],
    change: Callable[[Any], Any] = lambda part: part,
) -> Any:
    """A schema with each type that it names written out where it is named first.

    Args:
        schema: The schema.
        named: The types that it may name.
        seen: Those that are written out already.
        change: What becomes of each type, and of each name of one.
    """
    if isinstance(schema, list):
        return [_whole(branch, named, seen, change) for branch in schema]
    if isinstance(schema, str):
        if schema not in named:
            return schema
        return change(schema) if schema in seen else _whole(named[schema], named, seen, change)
    if schema["type"] in _NAMED and schema["name"] in seen:
        return change(schema["name"])
    seen.add(schema.get("name", ""))
    found = {name: value for name, value in schema.items() if not name.startswith("__")}
    if "." not in found.get("name", "."):
        found["namespace"] = ""  # not that of the record that it stands in
    for inner in ("items", "values", "type"):
        if inner in found:
            found[inner] = _whole(found[inner], named, seen, change)
    if "fields" in found:
        found["fields"] = [
            {**field, "type": _whole(field["type"], named, seen, change)}
            for field in found["fields"]
        ]
    return change(found)


def _copied(value: Any) -> Any:
    """A value with lists and dicts of its own."""
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    return value


def _said(problem: Exception) -> str:
    return f"{type(problem).__name__} {str(problem)[:500]}".strip()


def _names_of(schema: Any) -> dict[str, Any]:
    """The named types of a schema, by their full names."""
    names: dict[str, Any] = {}
    _collect(schema, names)
    return names


def _collect(schema: Any, names: dict[str, Any]) -> None:
    if isinstance(schema, list):
        for branch in schema:
            _collect(branch, names)
    elif isinstance(schema, dict):
        names.update(schema.get("__named_schemas", {}))
        if schema.get("type") in _NAMED:
            names[schema["name"]] = schema
        for field in schema.get("fields", ()):
            _collect(field["type"], names)
        for inner in ("items", "values", "type"):
            if isinstance(schema.get(inner), (list, dict)):
                _collect(schema[inner], names)


def _read_defaults(names: Mapping[str, Any], *, with_names: bool) -> None:
    """Give the reader's schema its defaults as values: fastavro takes them as JSON has them."""
    fields = [field for record in names.values() for field in record.get("fields", ())]
    found = {
        id(field): _default(field["type"], field["default"], names, with_names=with_names)
        for field in fields
        if "default" in field
    }
    for field in fields:
        if id(field) in found:
            field["default"] = found[id(field)]


def _default(schema: Any, value: Any, names: Mapping[str, Any], *, with_names: bool) -> Any:
    """A default of a schema, as if it had been read."""
    from fastavro.read import LOGICAL_READERS

    def inner(of: Any, one: Any) -> Any:
        return _default(of, one, names, with_names=with_names)

    if isinstance(schema, list):
        branch = next(one for one in schema if _may_be(one, value, names))
        found = inner(branch, value)
        named = branch if isinstance(branch, str) else branch.get("name")
        return (named, found) if with_names and named in names else found
    if isinstance(schema, str) and schema in names:
        return inner(names[schema], value)
    kind = type_of(schema)
    if kind in {"bytes", "fixed"}:
        value = value.encode("latin-1")
    elif kind in {"record", "error"}:
        return {
            field["name"]: inner(field["type"], value.get(field["name"], field.get("default")))
            for field in schema["fields"]
        }
    elif kind == "array":
        return [inner(schema["items"], one) for one in value]
    elif kind == "map":
        return {name: inner(schema["values"], one) for name, one in value.items()}
    logical = schema.get("logicalType") if isinstance(schema, dict) else None
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
