"""Column names and types that every reader of a Parquet output can read.

Readers use the schema of one file for all files of an output, so a frame must fit the existing
files. That schema is only in the footers of the files, so a deleted output accepts any schema
again. One file represents all files, because each write had to fit. If this process can read the
output, the check reads the footer of one file per write; otherwise Spark reads the schema of
the output once per process.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.decoding.columns import quoted
from dagster_rebalance.outputs import columns
from dagster_rebalance.spark.parquet_files import stored_schemas
from dagster_rebalance.spark.spark_jobs import is_connect

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

_SQL_NAMES = {"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint"}
_NO_FILES = ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA")

_known: dict[str, StructType] = {}
"""Schemas of outputs that are visible only to Spark."""


def refuse_ambiguous_names(schema: StructType) -> None:
    """Raise IllegalStateError if the names of columns or of fields differ only in capitals."""
    columns.refuse_ambiguous_names(_shape(schema.jsonValue()))


def stored_schema(
    session: SparkSession, output: str, folder: Path | None, path_column: str
) -> StructType | None:
    """Return the schema of the files of an output; None if there are no files.

    `folder` is the local folder of the output; None if this process cannot read it. Readers derive
    `path_column` from the paths, and no file has this column.
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
    """Return the frame with the columns of the stored files, in the same order and types.

    A narrower type is widened, as in tables: for example, `int` becomes `bigint`.
    """
    schema = frame.schema
    refuse_misfits(schema, stored, output)
    if _shape(schema.jsonValue()) == _shape(stored.jsonValue()):
        return frame
    return frame.selectExpr(*(_cast(field.name, field.dataType, schema) for field in stored))


def refuse_misfits(schema: StructType, stored: StructType, output: str) -> None:
    """Refuse a schema that does not fit the files of an output."""
    columns.refuse_misfits(_shapes(schema), _shapes(stored), output)


def refuse_concurrent_schemas(
    session: SparkSession, schema: StructType, folder: Path, written: Collection[Path]
) -> None:
    """Compare a schema with the files of concurrent writers that also found the output empty."""
    for file, noted in stored_schemas(folder):
        if file not in written:
            try:
                refuse_misfits(schema, _parse(session, file, noted), str(folder))
            except IllegalStateError as error:
                raise columns.concurrent_schemas(str(folder), error) from error


def _shapes(schema: StructType) -> dict[str, tuple[Any, str]]:
    return {
        name: (_shape(type_.jsonValue()), type_.simpleString())
        for name, type_ in _types(schema).items()
    }


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
