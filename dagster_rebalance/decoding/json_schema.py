"""JSON with a schema: the column of a schema, and the decoding of payloads into it.

A payload is validated by its writer's schema and reduced to the reader's properties. References are
never fetched: a reference that the registry does not have is an error.
"""

from __future__ import annotations

import json
from decimal import Decimal
from math import isinf
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding import columns
from dagster_rebalance.decoding.columns import Nesting
from dagster_rebalance.decoding.json_columns import JsonColumnReader, UnsupportedError
from dagster_rebalance.decoding.json_validation import InexactFloat, JsonValidator, to_decimal
from dagster_rebalance.decoding.wire_format import parse_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from dagster_rebalance.decoding.columns import Column, DecodeMany
    from dagster_rebalance.decoding.wire_format import SchemaText


def _json_text(value: Any) -> str:
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, InexactFloat):
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
    return value.text if isinstance(value, InexactFloat) else json.dumps(value)


_JSON_TEXT = columns.STRING.converted_by(_json_text)
_TYPES: dict[str, tuple[Column, type, tuple[type, ...]]] = {
    "string": (columns.STRING, str, (str,)),
    "boolean": (columns.BOOLEAN, bool, (bool,)),
    "number": (columns.DOUBLE, float, (int, float)),
}
"""The column, the Python type and all accepted Python types of a JSON type."""
_DIGITS_OF_A_DOUBLE = 15
"""Decimal digits that every double can hold."""
_BYTE_ORDER_MARKS = {b"\xef", b"\xfe", b"\xff"}
"""The first bytes of byte order marks."""
_CHOICES = ("oneOf", "anyOf", "allOf")
_DESCRIBING = {"properties", "$ref", *_CHOICES}


def open_reader(
    schema: SchemaText, writer: Callable[[int], SchemaText] | None, *, as_python: bool = False
) -> tuple[Column, Callable[[bytes], Any], DecodeMany | None]:
    """Return the column of the reader's schema, a function that decodes, and one for columns.

    Without `writer`, payloads have no frame. With `as_python`, all JSON objects become dicts, and
    there is no function for columns, as for schemas that are not read by column.
    """
    own = JsonValidator(schema)
    try:
        mapping = _ColumnMapping(is_ref_exclusive=own.is_ref_exclusive, as_python=as_python)
        column = mapping.column_of(own.root, own.resolver)
    except Exception as problem:
        msg = f"unusable JSON schema: {type(problem).__name__} {problem}"
        raise UndecodableError(msg) from problem
    validators: dict[int, JsonValidator] = {}
    parser = _Parser()

    def decode(payload: bytes) -> Any:
        validator, text = own, payload
        if writer is not None:
            frame = parse_frame(payload)
            text = payload[frame.starts_at :]
            if frame.schema_id not in validators:
                written = writer(frame.schema_id)
                validators[frame.schema_id] = own if written == schema else JsonValidator(written)
            validator = validators[frame.schema_id]
        last_inexact = parser.last_inexact
        try:
            value = parser.parse(text)
        except (ValueError, RecursionError) as problem:
            msg = f"it is not JSON: {type(problem).__name__} {problem}"
            raise UndecodableError(msg) from problem
        validator.validate(value, text, is_exact=parser.last_inexact is last_inexact)
        return value

    return column, decode, None if as_python else _decode_many(schema, own, writer, column)


def _decode_many(
    schema: SchemaText,
    validator: JsonValidator,
    writer: Callable[[int], SchemaText] | None,
    column: Column,
) -> DecodeMany | None:
    """Return a function that decodes payloads of the reader's schema by column, if it can."""
    try:
        by_column = JsonColumnReader(validator.root, column.arrow(), validator.steps)
    except UnsupportedError:
        return None

    def decode(payloads: Any) -> tuple[Any, Sequence[int]] | None:
        starts_at = 0
        if writer is not None:
            frame = parse_frame(payloads[0].as_py())
            if writer(frame.schema_id) != schema:
                return None
            starts_at = frame.starts_at
        return by_column.read(payloads, starts_at)

    return decode


def _refuse_constant(constant: str) -> None:
    msg = f"{constant} is not JSON"
    raise ValueError(msg)


class _Parser:
    """JSON parser that keeps all digits; `last_inexact` is the last number that is not a double."""

    def __init__(self) -> None:
        self.last_inexact: InexactFloat | None = None
        # json.loads would create a decoder per payload, which takes half of its time.
        self._decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=self._number)

    def parse(self, text: bytes) -> Any:
        if b"\0" in text[:4] or text[:1] in _BYTE_ORDER_MARKS:  # possibly not UTF-8
            return json.loads(text, parse_constant=_refuse_constant, parse_float=self._number)
        return self._decoder.decode(text.decode(errors="surrogatepass"))

    def _number(self, text: str) -> float:
        value = InexactFloat(text)
        if isinf(value):
            msg = "a number is larger than a double can be"
            raise ValueError(msg)
        if len(text) <= _DIGITS_OF_A_DOUBLE and "e" not in text and "E" not in text:
            return float(value)
        value.text = text
        try:
            is_exact = Decimal(repr(value)) == Decimal(text)
        except ArithmeticError:  # the exponent is beyond that of a Decimal
            is_exact = False
        if is_exact:
            return float(value)
        self.last_inexact = value
        return value


class _ColumnMapping:
    """Maps JSON schemas to columns.

    With `is_ref_exclusive`, keywords beside a `$ref` are ignored, as up to draft 7. With
    `as_python`, values without a column type stay Python values instead of text.
    """

    def __init__(self, *, is_ref_exclusive: bool, as_python: bool) -> None:
        self._is_ref_exclusive = is_ref_exclusive
        self._as_python = as_python
        self._free = columns.STRING if as_python else _JSON_TEXT
        self._nesting = Nesting()

    def column_of(self, schema: Any, resolver: Any, nesting: Nesting | None = None) -> Column:
        """Return the column of a schema; raise UndecodableError if it has too many columns."""
        nesting = nesting or self._nesting
        if not isinstance(schema, dict) or id(schema) in nesting:
            return self._free
        nesting.count_column()
        nesting = nesting.within(id(schema))
        column = self._first_column(schema, resolver, nesting)
        if not column.ddl.startswith("STRUCT") or len(_DESCRIBING & set(schema)) == 1:
            return column
        return self._merged_column(schema, resolver, nesting, column)

    def _first_column(self, schema: Any, resolver: Any, nesting: Nesting) -> Column:
        """Return the column of the first keyword that counts: `$ref`, a choice, or `type`."""
        if "$ref" in schema:
            target = resolver.lookup(schema["$ref"])
            return self.column_of(target.contents, target.resolver, nesting)
        for choice in _CHOICES:
            if choice in schema and "type" not in schema:
                others = _without_null(schema[choice])
                single = len(others) == 1
                return self.column_of(others[0], resolver, nesting) if single else self._free
        given = schema.get("type")
        kinds = [one for one in (given if isinstance(given, list) else [given]) if one != "null"]
        if len(kinds) != 1:
            return self._free
        return self._column_of_type(kinds[0], schema, resolver, nesting)

    def _merged_column(self, schema: Any, resolver: Any, nesting: Nesting, first: Column) -> Column:
        """Return the column of an object with the properties of all schemas that describe it.

        The column is JSON as text if a choice of several has properties that the object lacks.
        """
        parts = list(self._parts(schema, resolver))
        properties: dict[str, tuple[Any, Any]] = {}
        for part, its_resolver in parts:
            for name, one in part.get("properties", {}).items():
                properties.setdefault(name, (one, its_resolver))
        for part, _ in self._parts(schema, resolver, with_choices=True):
            if not properties.keys() >= part.get("properties", {}).keys():
                return self._free
        inner = nesting.within(*(id(part) for part, _ in parts))
        fields = [
            (name, self.column_of(one, its_resolver, inner))
            for name, (one, its_resolver) in properties.items()
        ]
        column = columns.struct(fields)
        if column.ddl == first.ddl:
            return first
        required = {one for part, _ in parts for one in part.get("required", ())}
        return _object_column(fields, required)

    def _parts(
        self,
        schema: Any,
        resolver: Any,
        nesting: Nesting | None = None,
        *,
        with_choices: bool = False,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield the schemas that describe one value, in the order of `_first_column`.

        The schemas of several choices are included only with `with_choices`.
        """
        nesting = nesting or self._nesting
        if not isinstance(schema, dict) or id(schema) in nesting:
            return
        nesting.count_column()
        nesting = nesting.within(id(schema))
        if "type" in schema and "$ref" not in schema:
            yield schema, resolver
        if "$ref" in schema:
            target = resolver.lookup(schema["$ref"])
            yield from self._parts(
                target.contents, target.resolver, nesting, with_choices=with_choices
            )
            if self._is_ref_exclusive:
                return
        for choice in _CHOICES:
            others = _without_null(schema.get(choice, ()))
            if with_choices or choice == "allOf" or len(others) == 1:
                for one in others:
                    yield from self._parts(one, resolver, nesting, with_choices=with_choices)
        if "type" not in schema or "$ref" in schema:
            yield schema, resolver

    def _column_of_type(self, kind: Any, schema: Any, resolver: Any, nesting: Nesting) -> Column:
        if kind in _TYPES:
            return _leaf_column(kind)
        if kind == "integer":
            return columns.LONG.converted_by(_to_integer)
        if kind == "array" and isinstance(schema.get("items"), dict):
            items = self.column_of(schema["items"], resolver, nesting)
            return _checked_column(columns.array(items), list)
        if kind == "object" and schema.get("properties"):
            fields = [
                (name, self.column_of(one, resolver, nesting))
                for name, one in schema["properties"].items()
            ]
            return _object_column(fields, schema.get("required", ()))
        if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
            values = self.column_of(schema["additionalProperties"], resolver, nesting)
            column = columns.mapping(columns.STRING, values)
            to_pairs = column.convert
            if self._as_python and to_pairs is not None:
                column = column.converted_by(lambda value: dict(to_pairs(value)))
            return _checked_column(column, dict)
        return self._free


def _without_null(choices: Iterable[Any]) -> list[Any]:
    return [one for one in choices if not (isinstance(one, dict) and one.get("type") == "null")]


def _leaf_column(kind: str) -> Column:
    column, plain, types = _TYPES[kind]
    return column.converted_by(
        lambda value: value if type(value) is plain else _check_type(value, types, kind)
    )


def _object_column(fields: Sequence[tuple[str, Column]], required: Collection[str]) -> Column:
    """Return a column of objects with the reader's properties only.

    A record without a required property is refused: in a topic with several schemas, it has another
    type than the reader.
    """
    parts = [(name, column.convert) for name, column in fields]

    def convert(value: Any) -> Any:
        _check_type(value, (dict,), "dict")
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

    return columns.struct(fields).converted_by(convert)


def _checked_column(column: Column, kind: type) -> Column:
    """Return a column that refuses values of another type, which the writer's schema may allow."""
    inner = column.convert

    def convert(value: Any) -> Any:
        _check_type(value, (kind,), kind.__name__)
        return value if inner is None else inner(value)

    return column.converted_by(convert)


def _check_type(value: Any, types: tuple[Any, ...], name: str) -> Any:
    if isinstance(value, types) and (bool in types or not isinstance(value, bool)):
        return float(value) if name == "number" else value
    kind = float if isinstance(value, InexactFloat) else type(value)
    msg = f"it has {kind.__name__} where the reader's schema has {name}"
    raise UndecodableError(msg)


def _to_integer(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, float):
        exact = to_decimal(value)
        if exact == int(exact):
            return int(exact)
    return int(_check_type(value, (int,), "integer"))
