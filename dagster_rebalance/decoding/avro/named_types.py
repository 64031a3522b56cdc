"""The named types of a schema of Avro, and which of their names say too little."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dagster_rebalance.decoding.avro.columns import parts_of

NAMED = {"record", "error", "enum", "fixed"}


def simple_name(name: str) -> str:
    """A name without its namespace."""
    return name.rpartition(".")[2]


def names_of(schema: Any) -> dict[str, Any]:
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
        if schema.get("type") in NAMED:
            names[schema["name"]] = schema
        for field in schema.get("fields", ()):
            _collect(field["type"], names)
        for inner in ("items", "values", "type"):
            if isinstance(schema.get(inner), (list, dict)):
                _collect(schema[inner], names)


def shared_names(schema: Any) -> frozenset[str]:
    """The simple names that several branches of one union have, or had as an alias."""
    names = names_of(schema)

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
