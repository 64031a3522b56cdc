"""The schema of the Parquet files that an output has already.

It is in the footers of the files and nowhere else, so an output that is deleted takes any schema
again. One file stands for all, because each write had to fit one. Where this process sees the
output, that costs the footer of one file per write; elsewhere Spark lists the output once per
process.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.spark.session.jobs import is_connect
from dagster_rebalance.spark.writing.footers import stored_schemas
from dagster_rebalance.spark.writing.schemas import refuse_misfits

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

_NO_FILES = ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA")

_known: dict[str, StructType] = {}
"""Schemas of outputs that only Spark sees."""


def schema_of_files(
    session: SparkSession, output: str, folder: Path | None, path_column: str
) -> StructType | None:
    """Return the schema of the files of an output; None where it has none.

    Args:
        session: A session that sees the output.
        output: As Spark knows it.
        folder: The same as a folder of this process, where that sees it.
        path_column: A column that readers take from the paths, and no file has.
    """
    found = next(stored_schemas(folder), None) if folder is not None else None
    if found is not None:
        return _parsed(session, *found)
    if folder is not None and not is_connect(session):
        return None
    # A Connect server may have another folder of that name than this machine.
    if output not in _known:
        schema = _inferred(session, output)
        if schema is None or path_column not in schema.names:
            return None
        _known[output] = _without(schema, path_column)
    return _known[output]


def refuse_other_first_writers(
    session: SparkSession, schema: StructType, folder: Path, written: Collection[Path]
) -> None:
    """Compare with the files of writers that found the output empty, too.

    Raises:
        IllegalStateError: One of them has written another schema at the same moment.
    """
    for file, noted in stored_schemas(folder):
        if file not in written:
            try:
                refuse_misfits(schema, _parsed(session, file, noted), str(folder))
            except IllegalStateError as error:
                msg = (
                    f"two writers have begun {folder} at the same moment with different schemas, "
                    f"and both have written: delete the files of one of them. {error}"
                )
                raise IllegalStateError(msg) from error


def _parsed(session: SparkSession, file: Path, noted: str | None) -> StructType:
    from pyspark.sql.types import StructType

    if noted is None:
        return session.read.parquet(f"file:{file}").schema
    return StructType.fromJson(json.loads(noted))


def _inferred(session: SparkSession, output: str) -> StructType | None:
    try:
        return session.read.parquet(output).schema
    except Exception as error:
        if any(sign in str(error) for sign in _NO_FILES):
            return None
        raise


def _without(schema: Any, column: str) -> StructType:
    from pyspark.sql.types import StructType

    return StructType([field for field in schema if field.name != column])
