"""The columns of Avro types, the same as in Spark's `from_avro` if that supports the type."""

from __future__ import annotations

from ctypes import c_float
from dataclasses import replace
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding import columns
from dagster_rebalance.decoding.avro_schemas import branches_of, type_of
from dagster_rebalance.decoding.columns import Nesting, Numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dagster_rebalance.decoding.columns import Column

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _micros(at: Any) -> int:
    moment = datetime.combine(_EPOCH.date(), at, tzinfo=timezone.utc)
    return (moment - _EPOCH) // (datetime.resolution)


# If the writer's schema has no logical type, the value is a plain number in the reader's unit.
def _time_number(convert: Callable[[Any], int]) -> Callable[[Any], int]:
    return lambda at: at if isinstance(at, int) else convert(at)


def _millis_to_micros(at: Any) -> Any:
    return at * 1000 if isinstance(at, int) else at


_DAY, _MILLI, _MICRO = timedelta(days=1), timedelta(milliseconds=1), timedelta(microseconds=1)


def _moments(column: Column, kind: str, unit: timedelta) -> Column:
    """Return a column of the times that Python supports, as numbers of a unit since the epoch."""

    def convert(numbers: Any) -> Any:
        import pyarrow as pa

        type_ = column.arrow()
        if unit == _MILLI:
            return numbers.view(pa.timestamp("ms", type_.tz)).cast(type_)
        return numbers.view(type_)

    first, last = (
        (moment.replace(tzinfo=timezone.utc) - _EPOCH) // unit
        for moment in (datetime.min, datetime.max)  # noqa: DTZ901 - they have no zone
    )
    return replace(column, numbers=Numbers(kind, first, last, convert))


def _times(kind: str, column: Column, unit: timedelta) -> Column:
    """Return a column of times of a day."""
    return replace(column, numbers=Numbers(kind, 0, _DAY // unit - 1, lambda numbers: numbers))


_PLAIN = {
    "boolean": columns.BOOLEAN,
    "int": columns.INT,
    "long": columns.LONG,
    "float": columns.FLOAT,
    "double": columns.DOUBLE,
    "bytes": columns.BINARY,
    "string": columns.STRING,
    "null": columns.JSON_TEXT,
}
_LOGICAL = {
    ("int", "date"): _moments(columns.DATE, "int32", _DAY),
    ("int", "time-millis"): _times(
        "int32", columns.INT.converted_by(_time_number(lambda at: _micros(at) // 1000)), _MILLI
    ),
    ("long", "time-micros"): _times(
        "int64", columns.LONG.converted_by(_time_number(_micros)), _MICRO
    ),
    ("long", "timestamp-millis"): _moments(
        columns.TIMESTAMP.converted_by(_millis_to_micros), "int64", _MILLI
    ),
    ("long", "timestamp-micros"): _moments(columns.TIMESTAMP, "int64", _MICRO),
    ("long", "local-timestamp-millis"): _moments(
        columns.LOCAL_TIMESTAMP.converted_by(_millis_to_micros), "int64", _MILLI
    ),
    ("long", "local-timestamp-micros"): _moments(columns.LOCAL_TIMESTAMP, "int64", _MICRO),
}
_NUMBERS = ({"int", "long"}, {"float", "double"})
"""A union of these has the type of the larger one."""
_PYTHON: dict[str, type] = {
    "boolean": bool,
    "int": int,
    "long": int,
    "float": float,
    "double": float,
    "bytes": bytes,
    "string": str,
    "array": list,
    "map": dict,
}
_LOGICAL_PYTHON: dict[tuple[str, str], type] = {
    ("int", "date"): date,
    ("int", "time-millis"): time,
    ("long", "time-micros"): time,
    **{key: datetime for key in _LOGICAL if "timestamp" in key[1]},
    ("bytes", "decimal"): Decimal,
}
_TIMES = {"time-millis", "time-micros"}
_INT_ENDS = 1 << 31


def column_of(schema: Any, names: Mapping[str, Any], nesting: Nesting | None = None) -> Column:
    """Return the column of a parsed schema; `names` has the named types."""
    nesting = nesting or Nesting()
    nesting.count_column()
    if isinstance(schema, list):
        return _union(schema, names, nesting)
    if isinstance(schema, str):
        return _PLAIN[schema] if schema in _PLAIN else column_of(names[schema], names, nesting)
    kind = schema["type"]
    if kind in {"record", "error"}:
        return _record(schema, names, nesting)
    if kind == "array":
        return columns.array(column_of(schema["items"], names, nesting))
    if kind == "map":
        return columns.mapping(columns.STRING, column_of(schema["values"], names, nesting))
    return _leaf(kind, schema) or column_of(kind, names, nesting)


def _record(schema: Any, names: Mapping[str, Any], nesting: Nesting) -> Column:
    if schema["name"] in nesting:
        return columns.STRING.converted_by(
            lambda value: columns.json_text(_without_branches(value))
        )
    inner = nesting.within(schema["name"])
    return columns.struct(
        [(field["name"], column_of(field["type"], names, inner)) for field in schema["fields"]]
    )


def _without_branches(value: Any) -> Any:
    """Return a value without the branch numbers of named types in unions."""
    if isinstance(value, tuple):
        return _without_branches(value[1])
    if isinstance(value, dict):
        return {name: _without_branches(one) for name, one in value.items()}
    return [_without_branches(one) for one in value] if isinstance(value, list) else value


def _leaf(kind: str, schema: Mapping[str, Any]) -> Column | None:
    """Return the column of a type without parts; None if the column of the plain type applies."""
    logical = schema.get("logicalType")
    if kind == "enum":
        return columns.STRING
    if kind in ("bytes", "fixed") and logical == "decimal":
        return columns.decimal(schema["precision"], schema.get("scale", 0))
    if kind == "fixed":
        return columns.BINARY
    return _LOGICAL.get((kind, str(logical)))


def _union(union: list[Any], names: Mapping[str, Any], nesting: Nesting) -> Column:
    branches = branches_of(union)
    if not branches:
        return columns.JSON_TEXT
    if len(branches) == 1:
        return column_of(branches[0], names, nesting)
    kinds = {str(type_of(branch)) for branch in branches}
    for numbers in _NUMBERS:
        if kinds <= numbers and all(isinstance(branch, str) for branch in branches):
            return _PLAIN[max(kinds, key=["int", "long", "float", "double"].index)]
    logical = {str(one.get("logicalType")) for one in branches if isinstance(one, dict)}
    if logical >= _TIMES:
        msg = (
            "a union has both time-millis and time-micros, which are indistinguishable as values: "
            "remove one of them from the reader's schema"
        )
        raise UndecodableError(msg)
    members = [column_of(branch, names, nesting) for branch in branches]

    def convert(value: Any) -> dict[str, Any]:
        number, inner = _branch_of_value(value, branches)
        convert = members[number].convert
        return {f"member{number}": inner if convert is None else convert(inner)}

    fields = [(f"member{number}", member) for number, member in enumerate(members)]
    return columns.struct(fields).converted_by(convert)


def _branch_of_value(value: Any, branches: list[Any]) -> tuple[int, Any]:
    if isinstance(value, tuple):  # a named type with the number of its branch
        return value
    for number, branch in enumerate(branches):
        if _fits(branch, value):
            return number, value
    msg = f"a {type(value).__name__} matches no branch of its union"
    raise UndecodableError(msg)


def _fits(branch: Any, value: Any) -> bool:
    kind = str(type_of(branch))
    logical = str(branch.get("logicalType")) if isinstance(branch, dict) else ""
    # Not by isinstance: a bool is an int, too, and a datetime a date.
    if type(value) is not _LOGICAL_PYTHON.get((kind, logical), _PYTHON.get(kind)):
        return False
    if kind == "float":
        return isinstance(value, float) and _has_single_precision(value)
    return kind != "int" or type(value) is not int or -_INT_ENDS <= value < _INT_ENDS


def _has_single_precision(value: float) -> bool:
    return value != value or c_float(value).value == value  # noqa: PLR0124 - true for NaN alone
