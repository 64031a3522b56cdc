"""Column names and types that every reader of a Parquet output can read.

Readers use the schema of one file for all files of an output, so a frame has to fit the existing
files. That schema is only in the footers of the files, so a deleted output accepts any schema
again. One file represents all of them, because each write had to fit. If this process sees the
output, the check reads the footer of one file per write; otherwise Spark lists the output once per
process.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.decoding.columns import quoted
from dagster_rebalance.spark.parquet_files import stored_schemas
from dagster_rebalance.spark.spark_jobs import is_connect

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

_INTEGERS = ("byte", "short", "integer", "long")
_SQL_NAMES = {"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint"}
_DECIMAL = re.compile(r"decimal\((\d+),(-?\d+)\)")
_MAX_DIFFERENCES = 5
"""Differences in a message; a frame may have hundreds of columns."""
_NO_FILES = ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA")

_known: dict[str, StructType] = {}
"""Schemas of outputs that only Spark sees."""


def refuse_ambiguous_names(schema: StructType) -> None:
    """Raise IllegalStateError if the names of columns or of fields differ only in capitals."""
    for first, second in _ambiguous_names(schema.jsonValue(), ""):
        msg = (
            f"the names {first!r} and {second!r} differ only in capitals, which Spark and most "
            "other readers ignore: the output could not be read. Rename one of them. Nothing was "
            "written."
        )
        raise IllegalStateError(msg)


def _ambiguous_names(type_: Any, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(type_, dict):
        return
    known: dict[str, str] = {}
    for field in type_.get("fields", ()):
        name = f"{path}{field['name']}"
        if (other := known.setdefault(name.lower(), name)) != name:
            yield other, name
        yield from _ambiguous_names(field["type"], f"{name}.")
    for part in ("elementType", "keyType", "valueType"):
        yield from _ambiguous_names(type_.get(part), path)


def stored_schema(
    session: SparkSession, output: str, folder: Path | None, path_column: str
) -> StructType | None:
    """Return the schema of the files of an output; None if there are none.

    `folder` is the output as this process sees it, None if it is not visible here. Readers derive
    `path_column` from the paths, and no file has it.
    """
    first = next(stored_schemas(folder), None) if folder is not None else None
    if first is not None:
        return _parse(session, *first)
    if folder is not None and not is_connect(session):
        return None
    # A Connect server may have another folder of that name than this machine.
    if output not in _known:
        schema = _infer(session, output)
        if schema is None or path_column not in schema.names:
            return None
        _known[output] = _without(schema, path_column)
    return _known[output]


def _parse(session: SparkSession, file: Path, noted: str | None) -> StructType:
    from pyspark.sql.types import StructType

    if noted is None:
        return session.read.parquet(f"file:{file}").schema
    return StructType.fromJson(json.loads(noted))


def _infer(session: SparkSession, output: str) -> StructType | None:
    try:
        return session.read.parquet(output).schema
    except Exception as error:
        if any(sign in str(error) for sign in _NO_FILES):
            return None
        raise


def _without(schema: Any, column: str) -> StructType:
    from pyspark.sql.types import StructType

    return StructType([field for field in schema if field.name != column])


def fit_to_files(frame: DataFrame, stored: StructType, output: str) -> DataFrame:
    """Return the frame with the columns of the stored files, in their order and of their types.

    A narrower type is widened, as in tables: an `int` becomes the `bigint` of the files.
    """
    schema = frame.schema
    refuse_misfits(schema, stored, output)
    if _shape(schema.jsonValue()) == _shape(stored.jsonValue()):
        return frame
    return frame.selectExpr(*(_cast(field.name, field.dataType, schema) for field in stored))


def refuse_misfits(schema: StructType, stored: StructType, output: str) -> None:
    """Refuse a schema that does not fit the files of an output."""
    differences = list(_differences(schema, stored))
    if not differences:
        return
    more = len(differences) - _MAX_DIFFERENCES
    shown = "; ".join(differences[:_MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
    msg = (
        f"the records do not fit the files of {output}: {shown}. Readers take the schema of one "
        "file for all, so they could read none of them. Cast or keep these columns, write to a new "
        "path, or write to a table (write_delta, write_iceberg), whose schema can change. Nothing "
        "was written."
    )
    raise IllegalStateError(msg)


def refuse_concurrent_schemas(
    session: SparkSession, schema: StructType, folder: Path, written: Collection[Path]
) -> None:
    """Compare a schema with the files of concurrent writers that also found the output empty."""
    for file, noted in stored_schemas(folder):
        if file not in written:
            try:
                refuse_misfits(schema, _parse(session, file, noted), str(folder))
            except IllegalStateError as error:
                msg = (
                    f"two writers created {folder} at the same moment with different schemas, and "
                    f"both have written: delete the files of one of them. {error}"
                )
                raise IllegalStateError(msg) from error


def _differences(schema: StructType, stored: StructType) -> Iterator[str]:
    now, then = _types(schema), _types(stored)
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


def _types(schema: StructType) -> dict[str, DataType]:
    return {field.name: field.dataType for field in schema}


def _cast(name: str, type_: DataType, schema: StructType) -> str:
    if _shape(_types(schema)[name].jsonValue()) == _shape(type_.jsonValue()):
        return quoted(name)
    return f"CAST({quoted(name)} AS {ddl(type_.jsonValue())}) AS {quoted(name)}"


def ddl(type_: Any) -> str:
    """Return a type, given as JSON, in SQL, with quoted names of fields."""
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
    """Return a type without nullability and metadata, which are irrelevant in a file."""
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
    """Whether each value of one type is a value of the other."""
    if isinstance(now, str) and isinstance(then, str):
        return _atom_widens(now, then)
    if type(now) is not type(then) or len(now) != len(then):
        return False
    if isinstance(now, tuple):  # a cast matches the fields of a struct by position
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
