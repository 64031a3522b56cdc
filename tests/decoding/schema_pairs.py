"""Random Avro schemas of writers and readers, and values of them."""

from __future__ import annotations

import io
from typing import Any

import fastavro
from hypothesis import strategies as st

from tests.decoding.records import Json, framed

_PRIMITIVES = ("boolean", "int", "long", "float", "double", "bytes", "string")
_LOGICAL = (
    {"type": "int", "logicalType": "date"},
    {"type": "int", "logicalType": "time-millis"},
    {"type": "long", "logicalType": "time-micros"},
    {"type": "long", "logicalType": "timestamp-millis"},
    {"type": "long", "logicalType": "timestamp-micros"},
    {"type": "long", "logicalType": "local-timestamp-millis"},
    {"type": "long", "logicalType": "local-timestamp-micros"},
    {"type": "long", "logicalType": "timestamp-nanos"},
    {"type": "string", "logicalType": "uuid"},
    {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2},
    {"type": "bytes", "logicalType": "decimal", "precision": 40, "scale": 2},
)
_PROMOTIONS = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
_DEFAULTS: dict[str, Json] = {
    "boolean": True,
    "int": 3,
    "long": 4,
    "float": 0.5,
    "double": 1.5,
    "bytes": "\xff",
    "string": "s",
    "array": [],
    "map": {},
    "enum": "A",
    "fixed": "ab",
}


class _Names:
    """Names that occur once in a schema."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"


def _schema(draw: Any, names: _Names, depth: int) -> Json:  # noqa: ANN401, PLR0911 - a type each
    kinds = ["primitive"] * 3 + ["logical"] * 3 + ["enum", "fixed", "optional", "optional"]
    if depth:
        kinds += ["record", "array", "map", "union"]
    kind = draw(st.sampled_from(kinds))
    if kind == "primitive":
        return draw(st.sampled_from(_PRIMITIVES))
    if kind == "logical":
        return dict(draw(st.sampled_from(_LOGICAL)))
    if kind == "enum":
        return {"type": "enum", "name": names("E"), "symbols": ["A", "B", "C"]}
    if kind == "fixed":
        return {"type": "fixed", "name": names("F"), "size": 2}
    if kind == "optional":
        inner = draw(st.sampled_from([*_PRIMITIVES, *_LOGICAL]))
        return draw(st.permutations(["null", inner]))
    if kind == "union":
        branches = draw(st.lists(st.sampled_from(["null", *_PRIMITIVES]), min_size=2, unique=True))
        return [*branches, {"type": "enum", "name": names("E"), "symbols": ["A", "B", "C"]}]
    if kind == "array":
        return {"type": "array", "items": _schema(draw, names, depth - 1)}
    if kind == "map":
        return {"type": "map", "values": _schema(draw, names, depth - 1)}
    return _record(draw, names, depth - 1)


def _record(draw: Any, names: _Names, depth: int) -> Json:  # noqa: ANN401 - of hypothesis
    count = draw(st.integers(1, 4))
    fields = [{"name": names("f"), "type": _schema(draw, names, depth)} for _ in range(count)]
    return {"type": "record", "name": names("R"), "fields": fields}


def _evolved(draw: Any, schema: Json, names: _Names) -> Json:  # noqa: ANN401, C901, PLR0911 - a type each
    """Return a later schema: other fields, promoted types, new unions."""
    change = draw(st.sampled_from(["", "", "", "optional", "promoted", "union"]))
    if isinstance(schema, str):
        if change == "promoted" and schema in _PROMOTIONS:
            return draw(st.sampled_from(_PROMOTIONS[schema]))
        if change == "optional":
            return ["null", schema]
        return [schema, "boolean"] if change == "union" and schema != "boolean" else schema
    if isinstance(schema, list):
        is_promoted = change == "promoted" and len(schema) == 2
        return [
            _PROMOTIONS[one][-1] if is_promoted and str(one) in _PROMOTIONS else one
            for one in schema
        ]
    if schema["type"] == "array":
        return {**schema, "items": _evolved(draw, schema["items"], names)}
    if schema["type"] == "map":
        return {**schema, "values": _evolved(draw, schema["values"], names)}
    if schema["type"] == "record":
        kept = [one for one in schema["fields"] if draw(st.integers(0, 5))]
        fields = [{**one, "type": _evolved(draw, one["type"], names)} for one in kept]
        for _ in range(draw(st.integers(0, 2))):
            type_ = _schema(draw, names, 0)
            new = {"name": names("n"), "type": type_}
            if draw(st.integers(0, 7)):
                new["default"] = _default(type_)
            fields.append(new)
        return {**schema, "fields": draw(st.permutations(fields))}
    if "logicalType" in schema and change == "union":
        others = [one for one in _LOGICAL if one["type"] == schema["type"]]
        return dict(draw(st.sampled_from(others)))
    if "logicalType" in schema and change == "promoted":
        return schema["type"]
    return ["null", schema] if change == "optional" else schema


def _default(schema: Json) -> Json:
    if isinstance(schema, list):
        return _default(schema[0])
    if isinstance(schema, dict):
        return "" if schema.get("logicalType") == "decimal" else _default(schema["type"])
    return _DEFAULTS.get(schema)


@st.composite
def pairs(draw: Any) -> tuple[Json, Json]:  # noqa: ANN401 - of hypothesis
    """Return the schemas of a writer and of a reader, which often have the same form."""
    names = _Names()
    writer = _record(draw, names, 2)
    return writer, draw(st.sampled_from([writer, _evolved(draw, writer, names)]))


def _plain(schema: Json) -> Json:
    """Return a schema without logical types, which fastavro would convert before it writes."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: one for name, one in schema.items() if name != "logicalType"}
    for part in {"items", "values"} & kept.keys():
        kept[part] = _plain(kept[part])
    if "fields" in kept:
        kept["fields"] = [{**one, "type": _plain(one["type"])} for one in kept["fields"]]
    return kept


def payload_of(schema_id: int, schema: Json, value: object) -> bytes:
    """Return a value without logical types in Avro, with its frame."""
    written = io.BytesIO()
    fastavro.schemaless_writer(written, fastavro.parse_schema(_plain(schema)), value)
    return framed(schema_id, written.getvalue())


def values_of(schema: Json) -> st.SearchStrategy[Any]:  # noqa: PLR0911 - a type each
    """Return values of a schema, as numbers for times and bytes for decimals."""
    if isinstance(schema, list):
        return st.one_of([st.builds(_in_branch, st.just(one), values_of(one)) for one in schema])
    if isinstance(schema, str):
        return _OF_PRIMITIVES[schema]
    kind = schema["type"]
    if kind == "enum":
        return st.sampled_from(schema["symbols"])
    if kind == "fixed":
        return st.binary(min_size=schema["size"], max_size=schema["size"])
    if kind == "array":
        return st.lists(values_of(schema["items"]), max_size=3)
    if kind == "map":
        return st.dictionaries(st.text(max_size=3), values_of(schema["values"]), max_size=3)
    if kind == "record":
        return st.fixed_dictionaries(
            {one["name"]: values_of(one["type"]) for one in schema["fields"]}
        )
    if schema.get("logicalType") == "decimal":
        return st.integers(-2_000_000, 2_000_000).map(
            lambda one: one.to_bytes(4, "big", signed=True)
        )
    if "logicalType" in schema and kind != "string":
        limit = (1 << 31) - 1 if kind == "int" else 1 << 62
        return st.one_of(st.integers(0, 86_399_999), st.integers(-limit, limit))
    return _OF_PRIMITIVES[kind]


def _in_branch(branch: Json, value: object) -> object:
    named = isinstance(branch, dict) and branch["type"] in {"record", "enum", "fixed"}
    name = branch["name"] if named else branch["type"] if isinstance(branch, dict) else branch
    return value if value is None else (name, value)


_OF_PRIMITIVES: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "int": st.integers(-(1 << 31), (1 << 31) - 1),
    "long": st.integers(-(1 << 63), (1 << 63) - 1),
    "float": st.floats(width=32),
    "double": st.floats(),
    "bytes": st.binary(max_size=5),
    "string": st.text(max_size=5),
}
