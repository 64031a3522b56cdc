"""Avro schemas: parsing with references, and the parts of a parsed schema."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from math import log10
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_rebalance.core.model.errors import UndecodableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dagster_rebalance.decoding.wire_format import SchemaText

NAMED = {"record", "error", "enum", "fixed"}
_MAX_PRECISION = 10_000
"""Digits of a decimal. With the 2,000,000,000 that a schema may ask for, one value takes hours."""


class AvroSchema(NamedTuple):
    """A schema as fastavro has parsed it.

    Attributes:
        root: The schema.
        names: The named types in it, by full name.
        parts: The schemas in it, each named type once.
    """

    root: Any
    names: Mapping[str, Any]
    parts: list[Any]


@contextmanager
def unusable_schema() -> Iterator[None]:
    """Turn an error of a schema into UndecodableError."""
    try:
        yield
    except Exception as problem:
        msg = f"unusable Avro schema: {describe(problem)}"
        raise UndecodableError(msg) from problem


def describe(problem: Exception) -> str:
    """Return the type and the beginning of the message of an exception."""
    return f"{type(problem).__name__} {str(problem)[:500]}".strip()


def parse(schema: SchemaText) -> AvroSchema:
    """Parse a schema and those that it refers to.

    Raises:
        UndecodableError: The schema is invalid, or a reference is missing.
    """
    import fastavro

    named: dict[str, Any] = {}
    with unusable_schema():
        for _, text in schema.references:
            fastavro.parse_schema(_load(text), named_schemas=named)
        root = fastavro.parse_schema(_load(schema.text), named_schemas=named)
        parsed = _collect_parts(root, named)
        for part in parsed.parts:
            _check_precision(part)
    return parsed


def _load(text: str) -> Any:
    return json.loads(text, object_hook=_without_invalid_decimal)


def _without_invalid_decimal(part: dict[str, Any]) -> dict[str, Any]:
    """Remove the logical type of an invalid decimal, which Avro requires to ignore."""
    if part.get("logicalType") == "decimal":
        precision, scale = part.get("precision"), part.get("scale", 0)
        is_valid = type(precision) is int and type(scale) is int and 0 <= scale <= precision
        if part.get("type") == "fixed" and is_valid:
            bits = 8 * part.get("size", 0) - 1
            is_valid = precision <= bits * log10(2)
        if not is_valid or precision == 0:
            del part["logicalType"]
    return part


def _check_precision(part: Any) -> None:
    if isinstance(part, dict) and part.get("logicalType") == "decimal":
        precision = part.get("precision") or 0
        if precision > _MAX_PRECISION:
            msg = f"a decimal has a precision of {precision}, and {_MAX_PRECISION} is the most"
            raise ValueError(msg)


def _collect_parts(root: Any, named: Mapping[str, Any]) -> AvroSchema:
    names: dict[str, Any] = {}
    parts, left = [], [root]
    while left:
        part = left.pop()
        if isinstance(part, str) and part in named and part not in names:
            part = named[part]
        if isinstance(part, dict) and part["type"] in NAMED:
            if part["name"] in names:
                continue
            names[part["name"]] = part
        parts.append(part)
        left += reversed(parts_of(part))
    return AvroSchema(root, names, parts)


def parts_of(schema: Any) -> list[Any]:
    """Return the schemas directly inside a schema; none for a name."""
    if isinstance(schema, str):
        return []
    if isinstance(schema, list):
        return schema
    parts = [schema[part] for part in ("items", "values") if part in schema]
    return parts + [field["type"] for field in schema.get("fields", ())]


def branches_of(union: list[Any]) -> list[Any]:
    """Return the branches of a union except null."""
    return [branch for branch in union if type_of(branch) != "null"]


def type_of(schema: Any) -> Any:
    """Return the type of a schema without its attributes."""
    return schema["type"] if isinstance(schema, dict) else schema


def simple_name(name: str) -> str:
    """Return a name without its namespace."""
    return name.rpartition(".")[2]


def shared_names(schema: AvroSchema) -> set[str]:
    """Return the simple names and aliases that several branches of one union share."""
    shared: set[str] = set()
    for union in schema.parts:
        if isinstance(union, list):
            named = (one if isinstance(one, str) else one.get("name") for one in union)
            branches = [schema.names[name] for name in named if name in schema.names]
            counts = Counter(
                name
                for branch in branches
                for name in {
                    simple_name(one) for one in (branch["name"], *branch.get("aliases", ()))
                }
            )
            shared.update(name for name, count in counts.items() if count > 1)
    return shared
