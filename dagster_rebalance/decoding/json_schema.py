"""JSON with a schema: which column it becomes, and how a payload is checked and read into it.

Owns the columns of JSON Schema's types. A payload is checked by the schema that it was written
with; what it has besides the reader's properties is left out. Nothing is fetched: a reference that
the registry does not have is an error.
"""

from __future__ import annotations

import json
from decimal import Decimal
from math import isinf
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding import columns
from dagster_rebalance.decoding.columns import Inside
from dagster_rebalance.decoding.json_validation import Check, Inexact, decimal_of
from dagster_rebalance.decoding.wire_format import frame_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from dagster_rebalance.decoding.columns import Column
    from dagster_rebalance.decoding.schema import SchemaText


def _json_text(value: Any) -> str:
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, Inexact):
            return _exact_text(value)
        if isinstance(part, (dict, list)):
            parts += part.values() if isinstance(part, dict) else part
    return columns.json_text(value)


def _exact_text(value: Any) -> str:
    if isinstance(value, dict):
        pairs = [f"{json.dumps(name)}: {_exact_text(one)}" for name, one in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_exact_text, value))}]"
    return value.text if isinstance(value, Inexact) else json.dumps(value)


_JSON_TEXT = columns.STRING.by(_json_text)
_TYPES: dict[str, tuple[Column, type, tuple[type, ...]]] = {
    "string": (columns.STRING, str, (str,)),
    "boolean": (columns.BOOLEAN, bool, (bool,)),
    "number": (columns.DOUBLE, float, (int, float)),
}
"""The column of a type, its plain type in Python, and all that it has."""

_DIGITS_OF_A_DOUBLE = 15
"""As many digits any double has."""

_MARKS = {b"\xef", b"\xfe", b"\xff"}
"""The first bytes of byte order marks."""

_CHOICES = ("oneOf", "anyOf", "allOf")
_DESCRIBING = {"properties", "$ref", *_CHOICES}


def reader(
    schema: SchemaText, writer: Callable[[int], SchemaText] | None, *, as_python: bool = False
) -> tuple[Column, Callable[[bytes], Any]]:
    """The column of a schema, and what decodes a payload into it.

    Args:
        schema: The reader's.
        writer: Finds the schema with an id; None for JSON without a frame.
        as_python: Whether the values are for people: with dicts wherever JSON has objects.

    Raises:
        UndecodableError: The schema cannot be used.
    """
    own = Check(schema)
    try:
        column = _Columns(is_ref_alone=own.is_ref_alone, as_python=as_python).of(
            own.root, own.resolver
        )
    except Exception as problem:
        msg = f"not a JSON schema that can be used: {type(problem).__name__} {problem}"
        raise UndecodableError(msg) from problem
    checks: dict[int, Check] = {}
    read = _Reading()

    def decode(payload: bytes) -> Any:
        check, text = own, payload
        if writer is not None:
            frame = frame_of(payload)
            text = payload[frame.starts_at :]
            if frame.schema_id not in checks:
                its = writer(frame.schema_id)
                checks[frame.schema_id] = own if its == schema else Check(its)
            check = checks[frame.schema_id]
        before = read.inexact
        try:
            value = read(text)
        except (ValueError, RecursionError) as problem:
            msg = f"it is no JSON: {type(problem).__name__} {problem}"
            raise UndecodableError(msg) from problem
        check(value, text, is_exact=read.inexact is before)
        return value

    return column, decode


def _refuse(constant: str) -> None:
    msg = f"{constant} is no JSON"
    raise ValueError(msg)


class _Reading:
    """Reads JSON, with the digits of its numbers.

    Attributes:
        inexact: The last number with more digits than a double has.
    """

    def __init__(self) -> None:
        self.inexact: Inexact | None = None
        # json.loads makes one for each payload, in half of its time.
        self._decoder = json.JSONDecoder(parse_constant=_refuse, parse_float=self._number)

    def __call__(self, text: bytes) -> Any:
        """A value."""
        if b"\0" in text[:4] or text[:1] in _MARKS:  # it may have another encoding than UTF-8
            return json.loads(text, parse_constant=_refuse, parse_float=self._number)
        return self._decoder.decode(text.decode(errors="surrogatepass"))

    def _number(self, text: str) -> float:
        value = Inexact(text)
        if isinf(value):
            msg = "a number is larger than a double can be"
            raise ValueError(msg)
        if len(text) <= _DIGITS_OF_A_DOUBLE and "e" not in text and "E" not in text:
            return float(value)
        value.text = text
        try:
            is_exact = Decimal(repr(value)) == Decimal(text)
        except ArithmeticError:  # an exponent that no decimal has
            is_exact = False
        if is_exact:
            return float(value)
        self.inexact = value
        return value


class _Columns:
    """The columns of schemas.

    Args:
        is_ref_alone: Whether what stands beside a `$ref` counts for nothing, as up to draft 7.
        as_python: Whether what has no type of its own stays as it is, and is not text.
    """

    def __init__(self, *, is_ref_alone: bool, as_python: bool) -> None:
        self._is_ref_alone = is_ref_alone
        self._as_python = as_python
        self._free = columns.STRING if as_python else _JSON_TEXT
        self._nowhere = Inside()

    def of(self, schema: Any, resolver: Any, inside: Inside | None = None) -> Column:
        """The column of a schema.

        Args:
            schema: The schema.
            resolver: Finds what it refers to.
            inside: The schemas that it stands in.

        Raises:
            UndecodableError: It has too many columns.
        """
        inside = inside or self._nowhere
        if not isinstance(schema, dict) or id(schema) in inside:
            return self._free
        inside.count()
        inside = inside.within(id(schema))
        column = self._of_one(schema, resolver, inside)
        if not column.ddl.startswith("STRUCT") or len(_DESCRIBING & set(schema)) == 1:
            return column
        return self._of_all(schema, resolver, inside, column)

    def _of_one(self, schema: Any, resolver: Any, inside: Inside) -> Column:
        """The column of what describes a place first: a `$ref`, its own type, a choice."""
        if "$ref" in schema:
            found = resolver.lookup(schema["$ref"])
            return self.of(found.contents, found.resolver, inside)
        for choice in _CHOICES:
            if choice in schema and "type" not in schema:
                others = _others(schema[choice])
                return self.of(others[0], resolver, inside) if len(others) == 1 else self._free
        given = schema.get("type")
        kinds = [one for one in (given if isinstance(given, list) else [given]) if one != "null"]
        return self._of_kind(kinds[0], schema, resolver, inside) if len(kinds) == 1 else self._free

    def _of_all(self, schema: Any, resolver: Any, inside: Inside, first: Column) -> Column:
        """The column of an object with the properties of all schemas that describe it.

        It is JSON as text where some of them are in one of several choices alone.
        """
        parts = list(self._parts(schema, resolver))
        found: dict[str, tuple[Any, Any]] = {}
        for part, its_resolver in parts:
            for name, one in part.get("properties", {}).items():
                found.setdefault(name, (one, its_resolver))
        for part, _ in self._parts(schema, resolver, with_choices=True):
            if not found.keys() >= part.get("properties", {}).keys():
                return self._free
        within = inside.within(*(id(part) for part, _ in parts))
        fields = [(name, self.of(one, its, within)) for name, (one, its) in found.items()]
        column = columns.struct(fields)
        if column.ddl == first.ddl:
            return first
        required = {one for part, _ in parts for one in part.get("required", ())}
        return _objects(fields, required)

    def _parts(
        self, schema: Any, resolver: Any, seen: Inside | None = None, *, with_choices: bool = False
    ) -> Iterator[tuple[Any, Any]]:
        """The schemas that describe one place together, the one of its first column first.

        Args:
            schema: The schema.
            resolver: Finds what it refers to.
            seen: The schemas that it stands in.
            with_choices: Whether those of several choices are among them.
        """
        seen = seen or self._nowhere
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.count()
        seen = seen.within(id(schema))
        if "type" in schema and "$ref" not in schema:
            yield schema, resolver
        if "$ref" in schema:
            target = resolver.lookup(schema["$ref"])
            yield from self._parts(
                target.contents, target.resolver, seen, with_choices=with_choices
            )
            if self._is_ref_alone:
                return
        for choice in _CHOICES:
            others = _others(schema.get(choice, ()))
            if with_choices or choice == "allOf" or len(others) == 1:
                for one in others:
                    yield from self._parts(one, resolver, seen, with_choices=with_choices)
        if "type" not in schema or "$ref" in schema:
            yield schema, resolver

    def _of_kind(self, kind: Any, schema: Any, resolver: Any, inside: Inside) -> Column:
        if kind in _TYPES:
            return _leaf(kind)
        if kind == "integer":
            return columns.LONG.by(_integer)
        if kind == "array" and isinstance(schema.get("items"), dict):
            return _of_type(columns.array(self.of(schema["items"], resolver, inside)), list)
        if kind == "object" and schema.get("properties"):
            fields = [
                (name, self.of(one, resolver, inside)) for name, one in schema["properties"].items()
            ]
            return _objects(fields, schema.get("required", ()))
        if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
            values = self.of(schema["additionalProperties"], resolver, inside)
            column = columns.mapping(columns.STRING, values)
            pairs = column.convert
            if self._as_python and pairs is not None:
                column = column.by(lambda value: dict(pairs(value)))
            return _of_type(column, dict)
        return self._free


def _others(choices: Iterable[Any]) -> list[Any]:
    """The choices besides null."""
    return [one for one in choices if not (isinstance(one, dict) and one.get("type") == "null")]


def _leaf(kind: str) -> Column:
    column, plain, types = _TYPES[kind]
    return column.by(lambda value: value if type(value) is plain else _of_types(value, types, kind))


def _objects(fields: Sequence[tuple[str, Column]], required: Collection[str]) -> Column:
    """A column of objects, without the properties that the reader's schema has not.

    A topic may hold records of several schemas. One that lacks required properties is of another
    type than the reader's.
    """
    parts = [(name, column.convert) for name, column in fields]

    def convert(value: Any) -> Any:
        _of_types(value, (dict,), "dict")
        missing = [name for name in required if name not in value]
        if missing:
            msg = f"it lacks {', '.join(missing)}, which the reader's schema requires"
            raise UndecodableError(msg)
        kept = {}
        for name, inner in parts:
            one = value.get(name)
            if one is not None:
                kept[name] = one if inner is None else inner(one)
            elif name in value:
                kept[name] = None
        return kept

    return columns.struct(fields).by(convert)


def _of_type(column: Column, kind: type) -> Column:
    """A column that refuses what is of another type: a writer's schema may have allowed it."""
    inner = column.convert

    def convert(value: Any) -> Any:
        _of_types(value, (kind,), kind.__name__)
        return value if inner is None else inner(value)

    return column.by(convert)


def _of_types(value: Any, types: tuple[Any, ...], name: str) -> Any:
    if isinstance(value, types) and (bool in types or not isinstance(value, bool)):
        return float(value) if name == "number" else value
    kind = float if isinstance(value, Inexact) else type(value)
    msg = f"the reader's schema has {name} where it has {kind.__name__}"
    raise UndecodableError(msg)


def _integer(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, float):
        exact = decimal_of(value)
        if exact == int(exact):
            return int(exact)
    return int(_of_types(value, (int,), "integer"))
