"""The type of a column: for Spark, for Arrow, and how a decoded value gets into it.

Owns which types there are. What has no type of its own (a type inside of itself, a free object, a
choice between JSON types) becomes JSON as text, in all formats.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import UndecodableError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

MOST_DIGITS = 38
"""Of a decimal in Spark."""
MOST_COLUMNS = 20_000
"""Of one schema, with those inside of structs. A schema of 2 kB can name one type 2^20 times."""
_MOST_TYPES_IN_EACH_OTHER = 150


@dataclass(frozen=True)
class Column:
    """The type of a column.

    Attributes:
        ddl: As Spark has it.
        arrow: Makes Arrow's type.
        convert: Makes what Arrow takes of a decoded value that is not None; None if it is that.
    """

    ddl: str
    arrow: Callable[[], Any]
    convert: Callable[[Any], Any] | None = None

    def by(self, convert: Callable[[Any], Any]) -> Column:
        """The same type for values of another form."""
        return Column(self.ddl, self.arrow, convert)


class Inside:
    """The types that a column is inside of, while the columns of a schema are made.

    Attributes:
        types: The types.
    """

    def __init__(self) -> None:
        self.types: frozenset[Hashable] = frozenset()
        self._made = [0]

    def __contains__(self, type_: Hashable) -> bool:
        return type_ in self.types

    def within(self, *types: Hashable) -> Inside:
        """The same, inside of more types.

        Raises:
            UndecodableError: Of too many.
        """
        inner = Inside()
        inner.types = self.types.union(types)
        if len(inner.types) > _MOST_TYPES_IN_EACH_OTHER:
            msg = f"it nests more than {_MOST_TYPES_IN_EACH_OTHER} types in each other"
            raise UndecodableError(msg)
        inner._made = self._made
        return inner

    def count(self) -> None:
        """Count a column.

        Raises:
            UndecodableError: The schema has too many.
        """
        self._made[0] += 1
        if self._made[0] > MOST_COLUMNS:
            msg = (
                f"it has more than {MOST_COLUMNS:,} columns, with those inside of structs: give a "
                "reader's schema with the columns that you need"
            )
            raise UndecodableError(msg)


def _arrow(name: str, *arguments: Any) -> Callable[[], Any]:
    def make() -> Any:
        import pyarrow as pa

        return getattr(pa, name)(*arguments)

    return make


def json_text(value: object) -> str:
    """A value as JSON; bytes in base64, times and decimals as text."""
    return json.dumps(value, default=_as_json)


def _as_json(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


STRING = Column("STRING", _arrow("string"))
BINARY = Column("BINARY", _arrow("binary"))
BOOLEAN = Column("BOOLEAN", _arrow("bool_"))
INT = Column("INT", _arrow("int32"))
LONG = Column("BIGINT", _arrow("int64"))
FLOAT = Column("FLOAT", _arrow("float32"))
DOUBLE = Column("DOUBLE", _arrow("float64"))
DATE = Column("DATE", _arrow("date32"))
# Plain TIMESTAMP is another type where spark.sql.timestampType says so.
TIMESTAMP = Column("TIMESTAMP_LTZ", _arrow("timestamp", "us", "UTC"))
LOCAL_TIMESTAMP = Column("TIMESTAMP_NTZ", _arrow("timestamp", "us"))
JSON_TEXT = STRING.by(json_text)


def decimal(digits: int, scale: int) -> Column:
    """A decimal; as text when it has more digits than Spark has."""
    if digits > MOST_DIGITS:
        return STRING.by(lambda value: format(value, "f"))
    return Column(f"DECIMAL({digits},{scale})", _arrow("decimal128", digits, scale))


def array(item: Column) -> Column:
    """An array."""
    convert = item.convert

    def of_items(values: Any) -> list[Any]:
        assert convert is not None  # noqa: S101 - for the type checker
        return [None if value is None else convert(value) for value in values]

    def arrow() -> Any:
        import pyarrow as pa

        return pa.list_(item.arrow())

    return Column(f"ARRAY<{item.ddl}>", arrow, of_items if convert else None)


def mapping(key: Column, value: Column) -> Column:
    """A map, of a dict."""

    def of_pairs(values: Any) -> list[tuple[Any, Any]]:
        convert = value.convert
        if convert is None:
            return list(values.items())
        return [(name, None if one is None else convert(one)) for name, one in values.items()]

    def arrow() -> Any:
        import pyarrow as pa

        return pa.map_(key.arrow(), value.arrow())

    return Column(f"MAP<{key.ddl}, {value.ddl}>", arrow, of_pairs)


def struct(fields: Sequence[tuple[str, Column]]) -> Column:
    """A struct, of a dict. One without fields is JSON, because no table can store it."""
    if not fields:
        return JSON_TEXT
    converted = [(name, column.convert) for name, column in fields if column.convert]

    def of_dict(values: Any) -> dict[str, Any]:
        found = dict(values)
        for name, convert in converted:
            value = found.get(name)
            if value is not None:
                found[name] = convert(value)
        return found

    def arrow() -> Any:
        import pyarrow as pa

        return pa.struct([(name, column.arrow()) for name, column in fields])

    inner = ", ".join(f"{quoted(name)}: {column.ddl}" for name, column in fields)
    return Column(f"STRUCT<{inner}>", arrow, of_dict if converted else None)


def quoted(name: str) -> str:
    """A name as Spark's SQL has it."""
    return "`" + name.replace("`", "``") + "`"
