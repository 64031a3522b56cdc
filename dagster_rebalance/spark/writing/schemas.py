"""Column names and types that every reader of an output can read.

Decides which frames fit the Parquet files that an output has, whose readers take the schema of one
file for all of them, and which names no reader can tell apart. Reads no file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.decoding.columns import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

_INTEGERS = ("byte", "short", "integer", "long")
_SQL_NAMES = {"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint"}
_DECIMAL = re.compile(r"decimal\((\d+),(-?\d+)\)")
_SHOWN = 5
"""Differences in a message; a frame may have hundreds of columns."""


def refuse_alike_names(schema: StructType) -> None:
    """Refuse columns, or fields of one column, whose names differ only in capitals.

    Raises:
        IllegalStateError: There are such names.
    """
    for first, second in _alike(schema.jsonValue(), ""):
        msg = (
            f"the names {first!r} and {second!r} differ only in capitals, which Spark and most "
            "other readers ignore: nobody could read the output. Rename one of them. Nothing was "
            "written."
        )
        raise IllegalStateError(msg)


def _alike(type_: Any, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(type_, dict):
        return
    known: dict[str, str] = {}
    for field in type_.get("fields", ()):
        name = f"{path}{field['name']}"
        if (other := known.setdefault(name.lower(), name)) != name:
            yield other, name
        yield from _alike(field["type"], f"{name}.")
    for part in ("elementType", "keyType", "valueType"):
        yield from _alike(type_.get(part), path)


def fitted(frame: DataFrame, schema: StructType, stored: StructType, output: str) -> DataFrame:
    """Return the frame with the columns of the stored files, in their order and of their types.

    A narrower type is widened, as tables do it: an `int` becomes the `bigint` of the files.

    Args:
        frame: The records.
        schema: Of the frame.
        stored: The schema of the files of the output.
        output: The output, for the message.

    Raises:
        IllegalStateError: A column is new or missing, or its type does not fit.
    """
    refuse_misfits(schema, stored, output)
    if _shape(schema.jsonValue()) == _shape(stored.jsonValue()):
        return frame
    return frame.selectExpr(*(_as_stored(field.name, field.dataType, schema) for field in stored))


def refuse_misfits(schema: StructType, stored: StructType, output: str) -> None:
    """Refuse a schema that the files of an output cannot have.

    Raises:
        IllegalStateError: A column is new or missing, or its type does not fit.
    """
    differences = list(_differences(schema, stored))
    if not differences:
        return
    more = len(differences) - _SHOWN
    shown = "; ".join(differences[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    msg = (
        f"the records do not fit the files of {output}: {shown}. Readers take the schema of one "
        "file for all, so they could read none of them. Cast or keep these columns, write to a new "
        "path, or write to a table (write_delta, write_iceberg), whose schema can change. Nothing "
        "was written."
    )
    raise IllegalStateError(msg)


def _differences(schema: StructType, stored: StructType) -> Iterator[str]:
    now, then = _columns(schema), _columns(stored)
    for name in [*then, *(name for name in now if name not in then)]:
        if name not in now:
            yield f"column {name!r} is missing"
        elif name not in then:
            yield f"column {name!r} is new"
        elif not _widens(_shape(now[name].jsonValue()), _shape(then[name].jsonValue())):
            yield (
                f"column {name!r} is {now[name].simpleString()}, "
                f"and {then[name].simpleString()} in the files"
            )


def _columns(schema: StructType) -> Mapping[str, DataType]:
    return {field.name: field.dataType for field in schema}


def _as_stored(name: str, type_: DataType, schema: StructType) -> str:
    if _shape(_columns(schema)[name].jsonValue()) == _shape(type_.jsonValue()):
        return quoted(name)
    return f"CAST({quoted(name)} AS {ddl(type_.jsonValue())}) AS {quoted(name)}"


def ddl(type_: Any) -> str:
    """Return a type, given as JSON, as SQL has it, with the names of fields in quotes."""
    match type_:
        case {"type": "struct", "fields": fields}:
            inner = (f"{quoted(one['name'])}: {ddl(one['type'])}" for one in fields)
            return f"STRUCT<{', '.join(inner)}>"
        case {"type": "array", "elementType": element}:
            return f"ARRAY<{ddl(element)}>"
        case {"type": "map", "keyType": key, "valueType": value}:
            return f"MAP<{ddl(key)}, {ddl(value)}>"
        case _:
            return _SQL_NAMES.get(type_, str(type_))


def _shape(type_: Any) -> Any:
    """Return a type without what does not matter in a file: nullability and metadata."""
    match type_:
        case {"type": "struct", "fields": fields}:
            return tuple((one["name"], _shape(one["type"])) for one in fields)
        case {"type": "array", "elementType": element}:
            return ["array", _shape(element)]
        case {"type": "map", "keyType": key, "valueType": value}:
            return ["map", _shape(key), _shape(value)]
        case _:
            return type_


def _widens(now: Any, then: Any) -> bool:
    """Whether each value of a type is one of the other type, too."""
    if isinstance(now, str) and isinstance(then, str):
        return _atom_widens(now, then)
    if type(now) is not type(then) or len(now) != len(then):
        return False
    if isinstance(now, tuple):  # a cast takes the fields of a struct by their places
        return all(
            one[0] == other[0] and _widens(one[1], other[1])
            for one, other in zip(now, then, strict=True)
        )
    if isinstance(now, list):
        return all(map(_widens, now, then))
    return bool(now == then)


def _atom_widens(now: str, then: str) -> bool:
    if now in _INTEGERS and then in _INTEGERS:
        return _INTEGERS.index(now) <= _INTEGERS.index(then)
    one, other = _DECIMAL.fullmatch(now), _DECIMAL.fullmatch(then)
    if one and other:
        digits, scale, most, longest = map(int, (*one.groups(), *other.groups()))
        return scale <= longest and digits - scale <= most - longest
    return now == then or (now, then) == ("float", "double")
