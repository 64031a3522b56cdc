"""Types and values of Arrow in Postgres: which column holds a type, and the values of a column.

Postgres rounds, cuts and shifts values that its column does not hold. A type is therefore refused
unless the column holds each of its values.
"""

from __future__ import annotations

import re
from datetime import date, timedelta
from functools import partial
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

from dagster_rebalance.decoding.columns import json_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

OWN = "own"
"""The type of columns whose type is defined in the database, such as an enum."""
_INTEGERS = ("smallint", "integer", "bigint", "numeric")
_FLOATS = ("real", "double precision")
_TEXTS = ("text", "character varying", "character")
_JSON = ("jsonb", "json", "text", "character varying")
_TIME = ("time without time zone",)
_HOLDERS: Mapping[str, Sequence[str]] = {
    "bool": ("boolean",),
    "int16": _INTEGERS,
    "int32": _INTEGERS[1:],
    "int64": _INTEGERS[2:],
    "int8": _INTEGERS,
    "uint8": _INTEGERS,
    "uint16": _INTEGERS[1:],
    "uint32": _INTEGERS[2:],
    "uint64": _INTEGERS[3:],
    "float": _FLOATS,
    "double": _FLOATS[1:],
    "halffloat": _FLOATS,
    "string": (*_TEXTS, "json", "jsonb", "uuid", "xml", "inet", "cidr", OWN),
    "binary": ("bytea",),
    "date32[day]": ("date",),
    "time64[us]": _TIME,
    "time32[s]": _TIME,
    "time32[ms]": _TIME,
    "timestamp[us, tz=UTC]": ("timestamp with time zone",),
    "timestamp[us]": ("timestamp without time zone",),
    "extension<arrow.uuid>": ("uuid",),
    "extension<arrow.json>": ("jsonb", "json"),
    "extension<arrow.bool8>": ("boolean",),
}
"""Postgres's types that hold all values of a type, the one for new columns first."""
_SIZED = re.compile(r"(numeric|character|character varying)\((\d+)(?:,(-?\d+))?\)")
_DAYS_OF_400_YEARS = 146_097
_EPOCH = date(1970, 1, 1).toordinal()


def misfit(name: str, type_: Any, column: str) -> str | None:
    """Return why a column of Postgres does not hold all values of a type, with the remedy."""
    types = import_module("pyarrow").types
    sized = _SIZED.fullmatch(column)
    base = sized[1] if sized else column
    fits = types.is_null(type_) or base in _holders(type_)
    if fits and sized and base == "numeric":
        digits, scale = int(sized[2]), int(sized[3])
        fits = types.is_decimal(type_) and (
            type_.scale <= scale and type_.precision - type_.scale <= digits - scale
        )
    if fits:
        return None
    cast = f"decimal128({sized[2]}, {sized[3]})" if sized and base == "numeric" else _arrow(base)
    alter = column_for(type_)
    remedies = [
        *([f"cast it to {cast}"] if cast else []),
        *([f"alter the column of the table to {alter}"] if alter else []),
    ]
    remedy = " or ".join(remedies) or "cast it to string, and alter the column to text"
    return f"column {name!r} is {type_}, and {column} in the table: {remedy}"


def _arrow(base: str) -> str | None:
    """Return the type of Arrow for a type of Postgres."""
    named = (arrow for arrow, held in _HOLDERS.items() if base == held[0])
    return next(named, "string" if base in _HOLDERS["string"] else None)


def column_for(type_: Any) -> str | None:
    """Return the type of a new column that holds a type, or None if there is none."""
    pa = import_module("pyarrow")
    if pa.types.is_decimal(type_):
        return f"numeric({type_.precision},{type_.scale})"
    return next(iter(_holders(type_)), None)


def _holders(type_: Any) -> Sequence[str]:
    types = import_module("pyarrow").types
    if types.is_struct(type_) or types.is_list(type_) or types.is_map(type_):
        return _JSON
    if types.is_null(type_):
        return ("text",)
    if types.is_decimal(type_):
        return ("numeric",)
    if types.is_fixed_size_binary(type_):
        return ("bytea",)
    return _HOLDERS.get(str(type_), ())


def rows(batch: Any, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a record batch for columns of Postgres of some types."""
    return zip(*map(_column, batch.columns, columns), strict=True)


def _column(array: Any, column: str) -> Iterable[Any]:
    types = import_module("pyarrow").types
    values = _values(array)
    convert: Callable[[Any], Any]
    if types.is_nested(array.type):
        convert = json_text
    elif types.is_string(array.type) and (sized := _SIZED.fullmatch(column)):
        convert = partial(_of_length, int(sized[2]), column)
    else:
        return values
    return (None if value is None else convert(value) for value in values)


def _of_length(length: int, column: str, value: str) -> str:
    """Return a text that Postgres neither cuts nor fills with spaces."""
    if len(value) > length or (len(value) < length and column.startswith("character(")):
        msg = f"a text has {len(value)} characters, which {column} does not store as they are"
        raise ValueError(msg)
    return value


def _values(array: Any) -> list[Any]:
    """Return the values of an array; a map as a dict, unless it has a key twice."""
    pa = import_module("pyarrow")
    type_ = array.type
    if pa.types.is_struct(type_):
        names = [field.name for field in type_]
        parts = [_values(part) for part in array.flatten()] or [[]] * len(array)
        found = zip(*parts, strict=True) if names else parts
        valid = array.is_valid().to_pylist()
        return [
            dict(zip(names, row, strict=True)) if is_valid else None
            for row, is_valid in zip(found, valid, strict=True)
        ]
    if pa.types.is_map(type_):
        pairs = array.cast(pa.list_(pa.struct([type_.key_field, type_.item_field])))
        return [None if one is None else _mapping(one) for one in _values(pairs)]
    if pa.types.is_list(type_):
        lengths = import_module("pyarrow.compute").list_value_length(array).to_pylist()
        items = iter(_values(array.flatten()))
        return [None if length is None else list(islice(items, length)) for length in lengths]
    try:
        return list(array.to_pylist())
    except OverflowError:  # before year 1 or after year 9999, which Postgres has
        if pa.types.is_timestamp(type_):
            moment = partial(_moment, "+00:00" if type_.tz else "")
            return _texts(array.cast(pa.int64()), moment)
        return _texts(array.cast(pa.int32()), _day)


def _texts(numbers: Any, text: Callable[[int], str]) -> list[str | None]:
    return [None if number is None else text(number) for number in numbers.to_pylist()]


def _mapping(pairs: list[dict[str, Any]]) -> Any:
    found = {pair["key"]: pair["value"] for pair in pairs}
    return found if len(found) == len(pairs) else [tuple(pair.values()) for pair in pairs]


def _moment(zone: str, microseconds: int) -> str:
    seconds, rest = divmod(microseconds, 1_000_000)
    days, seconds = divmod(seconds, 86_400)
    return _day(days, f" {timedelta(seconds=seconds)}.{rest:06}{zone}")


def _day(days: int, time: str = "") -> str:
    """Return a day since 1970 as text. The calendar repeats itself after 400 years."""
    cycles, day = divmod(days, _DAYS_OF_400_YEARS)
    found = date.fromordinal(_EPOCH + day)
    year = found.year + 400 * cycles
    rest = f"-{found:%m-%d}{time}"
    return f"{year:04}{rest}" if year > 0 else f"{1 - year:04}{rest} BC"
