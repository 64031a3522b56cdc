"""Avro schemas: parsing with references, exact logical types, and resolution.

fastavro takes the first branch of a reader's union that can hold the writer's type (a double for a
long), and fails if one schema references a type that the other schema defines in the same place. It
therefore receives two schemas of one form, in which only the pairs that `resolve` chose match.
fastavro also rounds a decimal with too many digits, wraps a time outside of a day, and normalises
the text of a UUID, so these schemas name logical types whose readers are registered here.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from decimal import Context, Decimal
from itertools import count
from math import log10
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_rebalance.core.model.errors import UndecodableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dagster_rebalance.decoding.wire_format import SchemaText

    Defaults = Mapping[tuple[str, str], Any]
    Pair = tuple[Any, Any]
    """A writer's and a reader's schema."""

NAMED = {"record", "error", "enum", "fixed"}
_MAX_PRECISION = 10_000
"""Digits of a decimal. With 2,000,000,000, which a schema may declare, one value takes hours."""
_PREFIX = "dagster-rebalance-"
BRANCH = f"{_PREFIX}branch"
"""The logical type of a record around a union branch; the record has no bytes in a payload."""
_DAYS = {("int", "time-millis"): 86_400_000, ("long", "time-micros"): 86_400_000_000}
"""The length of a day in the unit of each time type."""
_EXACT = {"decimal", *(logical for _, logical in _DAYS)}
_PROMOTIONS = {
    "int": ("long", "double", "float"),
    "long": ("double", "float"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
"""The types to which each type may be promoted. Types that keep its digits are first."""
_LEFT_OUT = {"aliases", "doc", "namespace"}
_NANOS = {"timestamp-nanos", "local-timestamp-nanos"}
"""Times that fastavro returns as numbers."""
TIMES = {
    *("date", "time-millis", "time-micros", "timestamp-millis", "timestamp-micros"),
    *("local-timestamp-millis", "local-timestamp-micros"),
}
"""Times whose columns also convert numbers."""


class AvroSchema(NamedTuple):
    """A schema as parsed by fastavro, its named types by full name, and all schemas inside it.

    `parts` has each named type once.
    """

    root: Any
    names: Mapping[str, Any]
    parts: list[Any]


@contextmanager
def unusable_schema() -> Iterator[None]:
    """Convert errors of a schema to UndecodableError."""
    try:
        yield
    except Exception as problem:
        msg = f"unusable Avro schema: {describe(problem)}"
        raise UndecodableError(msg) from problem


def describe(problem: Exception) -> str:
    """Return the type and the beginning of the message of an exception."""
    return f"{type(problem).__name__} {str(problem)[:500]}".strip()


def parse(schema: SchemaText) -> AvroSchema:
    """Parse a schema and the schemas that it references."""
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
    """Remove the logical type of an invalid decimal: Avro requires readers to ignore it."""
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
            msg = f"a decimal has a precision of {precision}; the maximum is {_MAX_PRECISION}"
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
    """Return the schemas directly inside a schema; none for a reference by name."""
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


def register_exact_readers() -> None:
    """Register the readers with fastavro."""
    from fastavro.read import LOGICAL_READERS

    LOGICAL_READERS[f"record-{BRANCH}"] = _read_branch
    for kind in ("bytes", "fixed"):
        LOGICAL_READERS[f"{kind}-{_PREFIX}decimal"] = _read_decimal
    for (kind, logical), day in _DAYS.items():
        LOGICAL_READERS[f"{kind}-{_PREFIX}{logical}"] = _time_reader(
            LOGICAL_READERS[f"{kind}-{logical}"], logical, day
        )


def exact(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose logical type is decoded by an exact reader, if there is one.

    The logical type uuid is removed: a UUID may be a key, and stays the string in the record.
    """
    logical = schema.get("logicalType")
    if logical == "uuid":
        return {name: one for name, one in schema.items() if name != "logicalType"}
    return schema | {"logicalType": f"{_PREFIX}{logical}"} if logical in _EXACT else schema


def _read_branch(data: Any, schema: Any, _: object = None) -> Any:
    if "refused" in schema:
        raise ValueError(schema["refused"])
    return (schema["branch"], data["value"]) if "branch" in schema else data["value"]


def _time_reader(read: Callable[..., Any], logical: str, day: int) -> Callable[..., Any]:
    def read_checked(data: int, *schemas: Any) -> Any:
        if not 0 <= data < day:
            msg = f"a {logical} is outside of one day"
            raise ValueError(msg)
        return read(data, *schemas)

    return read_checked


def _read_decimal(data: bytes, schema: Any, _: object = None) -> Decimal:
    precision = schema["precision"]
    unscaled = int.from_bytes(data, "big", signed=True)
    if abs(unscaled) >= 10**precision:
        msg = f"a decimal has more digits than its precision of {precision} allows"
        raise ValueError(msg)
    return Decimal(unscaled).scaleb(-schema.get("scale", 0), Context(prec=precision))


def resolve(
    writer: AvroSchema, reader: AvroSchema, defaults: Defaults, *, with_branches: bool
) -> tuple[Any, Any, bool]:
    """Return the schemas for fastavro, and whether they are wrapped in a record.

    The reader's schema is None if it is the writer's schema. Unless both schemas are records, each
    becomes the field `value` of a record; records are read a third faster without this. With
    `with_branches`, the value of a named type in a union of several types is a pair of its branch
    number (not counting null) and the value.
    """
    resolution = _Resolution(writer, reader, defaults, with_branches=with_branches)
    pair = resolution.match(writer.root, reader.root)
    is_wrapped = not all(map(_is_record, pair))
    if is_wrapped:
        pair = resolution.wrap(pair, "payload")
    for_writer, for_reader = _parse_pair(pair)
    return for_writer, None if reader is writer else for_reader, is_wrapped


def resolve_many(
    writer: AvroSchema, reader: AvroSchema, defaults: Defaults, end_bytes: int
) -> tuple[Pair, Pair]:
    """Return both schemas in one form, and those for fastavro of an array of payloads.

    Times in columns are numbers if both schemas have the same unit. An item of the array has the
    fields `value` and `end`, a mark of some bytes. The reader's schema of the array is None if it
    is the writer's schema.
    """
    resolution = _Resolution(writer, reader, defaults, with_branches=True, has_raw_times=True)
    pair = resolution.match(writer.root, reader.root)
    for_writer, for_reader = _parse_pair(resolution.with_marks(pair, end_bytes))
    return pair, (for_writer, None if reader is writer else for_reader)


def _parse_pair(pair: Pair) -> Pair:
    import fastavro

    names: dict[str, Any] = {}
    for_writer = fastavro.parse_schema(pair[0])
    for_reader = fastavro.parse_schema(pair[1], named_schemas=names)
    for record in names.values():
        for field in record.get("fields", ()):
            if "value" in field:  # set after parsing, which would check it as JSON
                field["default"] = field["value"]
    return for_writer, for_reader


def _is_record(schema: Any) -> bool:
    is_record = isinstance(schema, dict) and schema["type"] == "record"
    return is_record and "logicalType" not in schema


class _Resolution:
    """Walks a writer's and a reader's schema side by side, and builds the pair for fastavro."""

    def __init__(
        self,
        writer: AvroSchema,
        reader: AvroSchema,
        defaults: Defaults,
        *,
        with_branches: bool,
        has_raw_times: bool = False,
    ) -> None:
        self._writer = writer.names
        self._reader = reader.names
        self._shared = shared_names(writer) | shared_names(reader)
        self._is_same = reader is writer
        self._defaults = defaults
        self._with_branches = with_branches
        self._has_raw_times = has_raw_times
        self._names: dict[tuple[str, ...], str] = {}
        self._numbers = count(1)

    def match(self, writer: Any, reader: Any) -> Pair:
        """Return both schemas in one form."""
        writer, reader = _look_up(writer, self._writer), _look_up(reader, self._reader)
        if isinstance(writer, list) or isinstance(reader, list):
            return self._match_union(writer, reader)
        if self._distance(writer, reader) is None or _has_other_unit(writer, reader):
            return self._refuse(writer, reader)
        if type_of(writer) in NAMED:
            return self._match_named(writer, reader)
        pair = _bare(writer), _bare(reader)
        for inner in {"items", "values"} & set(writer if isinstance(writer, dict) else ()):
            with self._raw_times(is_allowed=False):
                pair[0][inner], pair[1][inner] = self.match(writer[inner], reader[inner])
        if (
            self._has_raw_times
            and _logical(writer) == _logical(reader)
            and _logical(writer) in TIMES
        ):
            return type_of(writer), type_of(reader)
        return pair

    @contextmanager
    def _raw_times(self, *, is_allowed: bool) -> Iterator[None]:
        """Unless it is allowed, read no times as numbers in the block."""
        before = self._has_raw_times
        self._has_raw_times = before and is_allowed
        try:
            yield
        finally:
            self._has_raw_times = before

    def with_marks(self, pair: Pair, end_bytes: int) -> Pair:
        """Put both schemas into arrays of values with marks."""
        end = {"type": "fixed", "name": self._new_name("end"), "size": end_bytes}
        row = {"type": "record", "name": self._new_name("row")}
        writer, reader = (
            {
                "type": "array",
                "items": {
                    **row,
                    "fields": [{"name": "value", "type": one}, {"name": "end", "type": end}],
                },
            }
            for one in pair
        )
        return writer, reader

    def wrap(self, pair: Pair, name: str, **more: Any) -> Pair:
        """Put both schemas into records, which have no bytes in a payload."""
        record = {"type": "record", "name": self._new_name(name), **more}
        writer, reader = ({**record, "fields": [{"name": "value", "type": one}]} for one in pair)
        return writer, reader

    def _match_union(self, writer: Any, reader: Any) -> Pair:
        branches = writer if isinstance(writer, list) else [writer]
        choices = reader if isinstance(reader, list) else [reader]
        is_ambiguous = len(branches_of(branches)) > 1 and not self._is_same
        is_single = len(branches_of(branches)) <= 1 and len(branches_of(choices)) <= 1
        pairs = []
        for branch in branches:
            chosen = self._nearest(branch, choices)
            if chosen is None:
                pairs.append(self._refuse(branch, reader))
                continue
            with self._raw_times(is_allowed=is_single):
                pair = self.match(branch, chosen)
            number = self._branch_number(chosen, choices)
            if number or (is_ambiguous and type_of(branch) != "null"):
                pair = self.wrap(pair, "branch", logicalType=BRANCH, **number)
            pairs.append(pair)
        if not isinstance(writer, list):
            return pairs[0]
        return [for_writer for for_writer, _ in pairs], [for_reader for _, for_reader in pairs]

    def _branch_number(self, chosen: Any, choices: list[Any]) -> dict[str, int]:
        branches = branches_of(choices)
        is_named = type_of(_look_up(chosen, self._reader)) in NAMED
        if not self._with_branches or len(branches) == 1 or not is_named:
            return {}
        return {"branch": branches.index(chosen)}

    def _nearest(self, branch: Any, choices: list[Any]) -> Any:
        """Return the reader's branch with the smallest distance, the first of several, or None."""
        branch = _look_up(branch, self._writer)
        fitting = [
            (distance, at)
            for at, one in enumerate(choices)
            if (distance := self._distance(branch, _look_up(one, self._reader))) is not None
        ]
        return choices[min(fitting)[1]] if fitting else None

    def _distance(self, writer: Any, reader: Any) -> int | None:
        """Return how many steps promote the writer's type to the reader's; None if impossible."""
        kind, other = type_of(writer), type_of(reader)
        if kind in NAMED:
            if kind != other:
                return None
            if writer["name"] == reader["name"]:
                return 0
            return 1 if self._is_alias(writer["name"], reader) else None
        promotions = (kind, *_PROMOTIONS.get(kind, ()))
        return promotions.index(other) if other in promotions else None

    def _is_alias(self, name: str, reader: Any) -> bool:
        aliases = reader.get("aliases", ())
        space = reader["name"].rpartition(".")[0]
        if name in {f"{space}.{one}" if space and "." not in one else one for one in aliases}:
            return True
        simple = simple_name(name)
        # A shared simple name could be that of a type in another namespace.
        return simple not in self._shared and simple in {simple_name(reader["name"]), *aliases}

    def _match_named(self, writer: Any, reader: Any) -> Pair:
        key = writer["name"], reader["name"], str(self._has_raw_times)
        if key in self._names:
            return self._names[key], self._names[key]
        name = self._names[key] = self._new_name(reader["name"])
        pair = {**_bare(writer), "name": name}, {**_bare(reader), "name": name}
        if "fields" in reader:
            pair[0]["fields"], pair[1]["fields"] = self._match_fields(writer, reader)
        return pair

    def _match_fields(self, writer: Any, reader: Any) -> tuple[list[Any], list[Any]]:
        """Return the fields of both schemas with the reader's names, in the writer's order."""
        names = {field["name"] for field in writer["fields"]}
        left = {field["name"]: field for field in reader["fields"]}
        renamed = {
            alias: name
            for name, field in left.items()
            if name not in names
            for alias in field.get("aliases", ())
        }
        for_writer, for_reader = [], []
        for field in writer["fields"]:
            name = field["name"] if field["name"] in left else renamed.get(field["name"])
            if name not in left:
                skipped = self._writer_only(field["type"], "skipped")
                for_writer.append({"name": field["name"], "type": skipped})
                continue
            pair = self.match(field["type"], left.pop(name)["type"])
            for_writer.append({"name": name, "type": pair[0]})
            for_reader.append({"name": name, "type": pair[1]})
        for name in left:
            key = reader["name"], name
            more = {"default": None, "value": self._defaults[key]} if key in self._defaults else {}
            for_reader.append({"name": name, "type": "null", **more})
        return for_writer, for_reader

    def _refuse(self, writer: Any, reader: Any) -> Pair:
        """Return a pair that refuses each value, because the reader has no type for it."""
        kinds = [_describe(one) for one in (reader if isinstance(reader, list) else [reader])]
        why = f"it has {_describe(writer)} where the reader's schema has {' or '.join(kinds)}"
        schema = self._writer_only(writer, "refused")
        return self.wrap((schema, schema), "refused", logicalType=BRANCH, refused=why)

    def _writer_only(self, schema: Any, place: str) -> Any:
        """Return a writer's schema for values that are refused or skipped."""
        if isinstance(schema, list):
            return [self._writer_only(branch, place) for branch in schema]
        schema = _look_up(schema, self._writer)
        if isinstance(schema, str):
            return schema
        part = _bare(schema)
        if part["type"] in NAMED:
            # The reader's schema defines none of the names in a skipped type.
            key = (schema["name"], "", place)
            if key in self._names:
                return self._names[key]
            part["name"] = self._names[key] = self._new_name(schema["name"])
        for inner in {"items", "values"} & set(part):
            part[inner] = self._writer_only(part[inner], place)
        if "fields" in part:
            part["fields"] = [
                {"name": field["name"], "type": self._writer_only(field["type"], place)}
                for field in part["fields"]
            ]
        return part

    def _new_name(self, name: str) -> str:
        return f"{simple_name(name)}_{next(self._numbers)}"


def _look_up(schema: Any, names: Mapping[str, Any]) -> Any:
    return names.get(schema, schema) if isinstance(schema, str) else schema


def _logical(schema: Any) -> str:
    return str(schema.get("logicalType", "")) if isinstance(schema, dict) else ""


def _has_other_unit(writer: Any, reader: Any) -> bool:
    """Return whether the reader would interpret nanoseconds as numbers of another unit."""
    return _logical(writer) in _NANOS and bool(_logical(reader)) and _logical(reader) not in _NANOS


def _describe(schema: Any) -> str:
    return _logical(schema) if _logical(schema) in _NANOS else str(type_of(schema))


def _bare(schema: Any) -> Any:
    """Return a schema without names and documentation."""
    if isinstance(schema, str):
        return schema
    kept = {
        name: one
        for name, one in schema.items()
        if name not in _LEFT_OUT and not name.startswith("__")
    }
    return exact(kept)
