"""Which column a type of Avro becomes: those of Spark's own `from_avro`, where it has one."""

from __future__ import annotations

from ctypes import c_float
from datetime import date, datetime, time, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding import columns
from dagster_rebalance.decoding.columns import Inside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dagster_rebalance.decoding.columns import Column

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _micros(at: Any) -> int:
    moment = datetime.combine(_EPOCH.date(), at, tzinfo=timezone.utc)
    return (moment - _EPOCH) // (datetime.resolution)


# A writer whose schema had no logical type has written a plain number, in the reader's unit.
def _of_time(of_time: Callable[[Any], int]) -> Callable[[Any], int]:
    return lambda at: at if isinstance(at, int) else of_time(at)


def _of_millis(at: Any) -> Any:
    return at * 1000 if isinstance(at, int) else at


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
    ("int", "date"): columns.DATE,
    ("int", "time-millis"): columns.INT.by(_of_time(lambda at: _micros(at) // 1000)),
    ("long", "time-micros"): columns.LONG.by(_of_time(_micros)),
    ("long", "timestamp-millis"): columns.TIMESTAMP.by(_of_millis),
    ("long", "timestamp-micros"): columns.TIMESTAMP,
    ("long", "local-timestamp-millis"): columns.LOCAL_TIMESTAMP.by(_of_millis),
    ("long", "local-timestamp-micros"): columns.LOCAL_TIMESTAMP,
}
_NUMBERS = ({"int", "long"}, {"float", "double"})
"""Unions of these have the larger one's type."""
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
    ("long", "timestamp-millis"): datetime,
    ("long", "timestamp-micros"): datetime,
    ("long", "local-timestamp-millis"): datetime,
    ("long", "local-timestamp-micros"): datetime,
    ("bytes", "decimal"): Decimal,
}
_TIMES = {"time-millis", "time-micros"}
_INT_ENDS = 1 << 31


def parts_of(schema: Any) -> list[Any]:
    """The schemas that a schema is made of, or nothing for a name."""
    if isinstance(schema, str):
        return []
    if isinstance(schema, list):
        return schema
    parts = [schema[part] for part in ("items", "values", "type") if part in schema]
    return parts + [field["type"] for field in schema.get("fields", ())]


def branches_of(union: list[Any]) -> list[Any]:
    """The branches of a union besides null."""
    return [branch for branch in union if branch != "null" and type_of(branch) != "null"]


def type_of(schema: Any) -> Any:
    """The type of a schema, whatever else it says."""
    return schema["type"] if isinstance(schema, dict) else schema


def column_of(schema: Any, names: Mapping[str, Any], inside: Inside | None = None) -> Column:
    """The column of a schema.

    Args:
        schema: As fastavro has parsed it.
        names: Its named types.
        inside: The records that it stands in.

    Raises:
        UndecodableError: It has too many columns, or cannot be told apart in a union.
    """
    inside = inside or Inside()
    inside.count()
    if isinstance(schema, list):
        return _union(schema, names, inside)
    if isinstance(schema, str):
        return _PLAIN[schema] if schema in _PLAIN else column_of(names[schema], names, inside)
    kind = schema["type"]
    if kind in {"record", "error"}:
        return _record(schema, names, inside)
    if kind in {"array", "map"}:
        inner = column_of(schema["items" if kind == "array" else "values"], names, inside)
        return columns.array(inner) if kind == "array" else columns.mapping(columns.STRING, inner)
    return _leaf(kind, schema) or column_of(kind, names, inside)


def _record(schema: Any, names: Mapping[str, Any], inside: Inside) -> Column:
    if schema["name"] in inside:
        return columns.STRING.by(lambda value: columns.json_text(_without_names(value)))
    within = inside.within(schema["name"])
    return columns.struct(
        [(field["name"], column_of(field["type"], names, within)) for field in schema["fields"]]
    )


def _without_names(value: Any) -> Any:
    """A value without the numbers of the branches that its named types are in unions."""
    if isinstance(value, tuple):
        return _without_names(value[1])
    if isinstance(value, dict):
        return {name: _without_names(one) for name, one in value.items()}
    return [_without_names(one) for one in value] if isinstance(value, list) else value


def _leaf(kind: Any, schema: Mapping[str, Any]) -> Column | None:
    """The column of a type without parts, if it is another one than that of its plain type."""
    logical = schema.get("logicalType")
    if kind == "enum":
        return columns.STRING
    if kind in ("bytes", "fixed") and logical == "decimal":
        return columns.decimal(schema["precision"], schema.get("scale", 0))
    if kind == "fixed":
        return columns.BINARY
    return _LOGICAL.get((kind, str(logical))) if isinstance(kind, str) else None


def _union(union: list[Any], names: Mapping[str, Any], inside: Inside) -> Column:
    branches = branches_of(union)
    if not branches:
        return columns.JSON_TEXT
    if len(branches) == 1:
        return column_of(branches[0], names, inside)
    kinds = {str(type_of(branch)) for branch in branches}
    for numbers in _NUMBERS:
        if kinds <= numbers and all(isinstance(branch, str) for branch in branches):
            return _PLAIN[max(kinds, key=["int", "long", "float", "double"].index)]
    logical = {str(one.get("logicalType")) for one in branches if isinstance(one, dict)}
    if logical >= _TIMES:
        msg = (
            "a union has both time-millis and time-micros, and their values do not say which they "
            "are: leave one of them out of the reader's schema"
        )
        raise UndecodableError(msg)
    members = [column_of(branch, names, inside) for branch in branches]

    def choose(value: Any) -> dict[str, Any]:
        number, inner = _chosen(value, branches)
        convert = members[number].convert
        return {f"member{number}": inner if convert is None else convert(inner)}

    return columns.struct([(f"member{at}", member) for at, member in enumerate(members)]).by(choose)


def _chosen(value: Any, branches: list[Any]) -> tuple[int, Any]:
    if isinstance(value, tuple):  # of a named type, with the number of its branch
        return value
    for at, branch in enumerate(branches):
        if _fits(branch, value):
            return at, value
    msg = f"a {type(value).__name__} fits no branch of its union"
    raise UndecodableError(msg)


def _fits(branch: Any, value: Any) -> bool:
    kind = str(type_of(branch))
    logical = str(branch.get("logicalType")) if isinstance(branch, dict) else ""
    # By the very type: a bool is an int, too, and a datetime a date.
    if type(value) is not _LOGICAL_PYTHON.get((kind, logical), _PYTHON.get(kind)):
        return False
    if kind == "float":
        return isinstance(value, float) and _has_single_precision(value)
    return kind != "int" or type(value) is not int or -_INT_ENDS <= value < _INT_ENDS


def _has_single_precision(value: float) -> bool:
    return value != value or c_float(value).value == value  # noqa: PLR0124 - NaN alone is not itself
