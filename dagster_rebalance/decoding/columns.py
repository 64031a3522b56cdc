"""Column types: their Spark DDL, their Arrow type, and the conversion of decoded values.

A value without a column type (a recursive type, a free-form object, a choice of JSON types) becomes
JSON as text, in all formats.
"""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import UndecodableError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    DecodeMany = Callable[[Any], tuple[Any, Sequence[int]] | None]
    """Decodes a binary array of payloads, and returns the values as an array with the rows that are
    decoded otherwise."""

MAX_DIGITS = 38
"""Precision of a decimal in Spark."""
MAX_COLUMNS = 20_000
"""Columns of a schema, nested ones included. A schema of 2 kB can name one type 2^20 times."""
_MAX_NESTED_TYPES = 150


@dataclass(frozen=True)
class Numbers:
    """The conversion of the numbers of a column.

    Attributes:
        kind: The Arrow type of the numbers.
        first: The smallest number with a value.
        last: The largest number with a value.
        convert: Converts an array of numbers to the column.
    """

    kind: str
    first: int
    last: int
    convert: Callable[[Any], Any]

    def __call__(self, values: Sequence[int | None]) -> Any:
        """Return numbers as an array of the column; raise ValueError if one has no value."""
        import pyarrow as pa

        given = [value for value in values if value is not None]
        if given and not self.first <= min(given) <= max(given) <= self.last:
            msg = f"a number is not within {self.first} and {self.last}"
            raise ValueError(msg)
        return self.convert(pa.array(values, self.kind))


@dataclass(frozen=True)
class Column:
    """The type of a column.

    Attributes:
        ddl: The type in Spark SQL.
        arrow: Creates the Arrow type.
        convert: Converts a decoded value that is not None for Arrow; None if no conversion is
            needed.
        fields: The columns of a struct whose values are dicts; empty for all other types.
        numbers: Converts many numbers at once, instead of `convert`.
    """

    ddl: str
    arrow: Callable[[], Any]
    convert: Callable[[Any], Any] | None = None
    fields: tuple[tuple[str, Column], ...] = ()
    numbers: Numbers | None = None

    def converted_by(self, convert: Callable[[Any], Any]) -> Column:
        """Return this type with another conversion."""
        return Column(self.ddl, self.arrow, convert)

    def array_of(self, values: Sequence[Any]) -> Any:
        """Return decoded values as an array, field by field; raise an error if one does not fit."""
        import pyarrow as pa

        if self.fields:
            mask = None
            if not all(values):  # a dict with fields is true
                mask = pa.array([value is None for value in values])
                empty = dict.fromkeys(name for name, _ in self.fields)
                values = [empty if value is None else value for value in values]
            parts = [
                column.array_of(list(map(itemgetter(name), values))) for name, column in self.fields
            ]
            return pa.StructArray.from_arrays(parts, fields=list(self.arrow()), mask=mask)
        if self.numbers is not None and all(
            value is None or type(value) is int for value in values
        ):
            return self.numbers(values)
        if self.convert is not None:
            convert = self.convert
            values = [None if value is None else convert(value) for value in values]
        return pa.array(values, self.arrow())


class Nesting:
    """The types around a column during the conversion of a schema; counts the columns."""

    def __init__(self) -> None:
        self._types: frozenset[Hashable] = frozenset()
        self._count = [0]

    def __contains__(self, type_: Hashable) -> bool:
        return type_ in self._types

    def within(self, *types: Hashable) -> Nesting:
        """Return the nesting inside further types; raise UndecodableError if it is too deep."""
        inner = Nesting()
        inner._types = self._types.union(types)
        if len(inner._types) > _MAX_NESTED_TYPES:
            msg = f"it nests more than {_MAX_NESTED_TYPES} types in each other"
            raise UndecodableError(msg)
        inner._count = self._count
        return inner

    def count_column(self) -> None:
        """Count a column; raise UndecodableError if the schema has too many."""
        self._count[0] += 1
        if self._count[0] > MAX_COLUMNS:
            msg = (
                f"it has more than {MAX_COLUMNS:,} columns, nested ones included: give a reader's "
                "schema with the columns that you need"
            )
            raise UndecodableError(msg)


def _arrow(name: str, *arguments: Any) -> Callable[[], Any]:
    def make() -> Any:
        import pyarrow as pa

        return getattr(pa, name)(*arguments)

    return make


def json_text(value: object) -> str:
    """Return a value as JSON: bytes in base64, times, decimals, NaN and infinities as text."""
    try:
        return json.dumps(value, default=_to_json, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(value), default=_to_json, allow_nan=False)


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _to_json(value: object) -> object:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


STRING = Column("STRING", _arrow("string"))
BINARY = Column("BINARY", _arrow("binary"))
BOOLEAN = Column("BOOLEAN", _arrow("bool_"))
INT = Column("INT", _arrow("int32"))
LONG = Column("BIGINT", _arrow("int64"))
FLOAT = Column("FLOAT", _arrow("float32"))
DOUBLE = Column("DOUBLE", _arrow("float64"))
DATE = Column("DATE", _arrow("date32"))
# TIMESTAMP alone has the meaning of spark.sql.timestampType.
TIMESTAMP = Column("TIMESTAMP_LTZ", _arrow("timestamp", "us", "UTC"))
LOCAL_TIMESTAMP = Column("TIMESTAMP_NTZ", _arrow("timestamp", "us"))
JSON_TEXT = STRING.converted_by(json_text)


def decimal(digits: int, scale: int) -> Column:
    """Return a decimal column, or a text column if Spark's decimal has fewer digits."""
    if digits > MAX_DIGITS:
        return STRING.converted_by(lambda value: format(value, "f"))
    return Column(f"DECIMAL({digits},{scale})", _arrow("decimal128", digits, scale))


def array(item: Column) -> Column:
    """Return an array column."""
    convert = item.convert

    def convert_items(values: Any) -> list[Any]:
        assert convert is not None  # noqa: S101 - for the type checker
        return [None if value is None else convert(value) for value in values]

    def arrow() -> Any:
        import pyarrow as pa

        return pa.list_(item.arrow())

    return Column(f"ARRAY<{item.ddl}>", arrow, convert_items if convert else None)


def mapping(key: Column, value: Column) -> Column:
    """Return a map column for dicts."""
    convert = value.convert

    def convert_items(values: Any) -> list[tuple[Any, Any]]:
        if convert is None:
            return list(values.items())
        return [(name, None if one is None else convert(one)) for name, one in values.items()]

    def arrow() -> Any:
        import pyarrow as pa

        return pa.map_(key.arrow(), value.arrow())

    return Column(f"MAP<{key.ddl}, {value.ddl}>", arrow, convert_items)


def struct(fields: Sequence[tuple[str, Column]]) -> Column:
    """Return a struct column for dicts; JSON text if it has no fields, which no table can store."""
    if not fields:
        return JSON_TEXT
    converted = [(name, column.convert) for name, column in fields if column.convert]

    def convert_fields(values: Any) -> dict[str, Any]:
        result = dict(values)
        for name, convert in converted:
            value = result.get(name)
            if value is not None:
                result[name] = convert(value)
        return result

    def arrow() -> Any:
        import pyarrow as pa

        return pa.struct([(name, column.arrow()) for name, column in fields])

    inner = ", ".join(f"{quoted(name)}: {column.ddl}" for name, column in fields)
    return Column(
        f"STRUCT<{inner}>", arrow, convert_fields if converted else None, fields=tuple(fields)
    )


def quoted(name: str) -> str:
    """Quote an identifier for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"
