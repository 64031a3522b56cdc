"""Output by range in tables of Iceberg.

An overwrite with a filter drops whole files. Iceberg evaluates the filter again in each attempt to
commit, so it finds the rows that another writer has just added. It refuses a file that also has
rows of other ranges, as after a compaction; a MERGE then rewrites such files.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.decoding.columns import quoted
from dagster_rebalance.spark.reading.ranges import functions_of
from dagster_rebalance.spark.session.connector import ICEBERG as ICEBERG_PACKAGES
from dagster_rebalance.spark.session.connector import coordinates_text
from dagster_rebalance.spark.writing.schemas import ddl
from dagster_rebalance.spark.writing.tables import (
    Rows,
    TableFormat,
    merges_schema,
    overwrite,
    replace_rows,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame

    from dagster_rebalance.core.model.offsets import OffsetRange

ICEBERG = TableFormat(
    name="Iceberg",
    provider="iceberg",
    conflict=re.compile(
        r"CommitFailedException|Found conflicting files|AlreadyExistsException"
        r"|TABLE_OR_VIEW_ALREADY_EXISTS|Missing required files to delete|FIELD_ALREADY_EXISTS"
    ),
    setup=(
        f"it needs the package {coordinates_text(ICEBERG_PACKAGES)} (setting spark.jars.packages, "
        "which KafkaSparkResource fills in), a catalog (spark.sql.catalog.lake="
        "org.apache.iceberg.spark.SparkCatalog, and its settings), and a table in that catalog "
        "(lake.shop.orders). Give them in spark_config of KafkaSparkResource, or to the Spark "
        "Connect server when it starts."
    ),
)
_SHARED_FILE = "Cannot delete file where some, but not all, rows match filter"
_NEW_COLUMNS = "TOO_MANY_DATA_COLUMNS"
_UNRESOLVED = "UNRESOLVED_COLUMN"
_ANY_SCHEMA = "write.spark.accept-any-schema"
_PREFIX = "dagster_rebalance_replaced_"


def write_iceberg(
    frame: DataFrame,
    table: str,
    ranges: Sequence[OffsetRange],
    *,
    options: Mapping[str, str] | None = None,
) -> None:
    """Write records to a table of Iceberg, replacing ranges that were written before.

    The guarantees, arguments and errors are those of `write_delta`, except that:

    - `table` is a name with its catalog (`lake.shop.orders`), whose namespace must exist;
    - `options` are, for example, `fanout-enabled` or `snapshot-property.team`, and do not apply to
      a write into compacted files. With `mergeSchema`, the new columns of the frame are added to
      the table first;
    - a table that accepts any schema and was compacted is a ConfigurationError.

    The catalog must make commits atomic for all writers, as REST, Hive, Glue and JDBC catalogs do.
    Iceberg's Hadoop catalog does not on object stores, and on a mounted file system only within one
    Spark.
    """

    def write(checked: DataFrame, rows: Rows) -> None:
        try:
            _replace(checked, table, rows, options)
        except Exception as error:
            if not merges_schema(options) or _NEW_COLUMNS not in str(error):
                raise
            _add_columns(checked, table)
            _replace(checked, table, rows, options)

    replace_rows(
        frame, table, ranges, ICEBERG, create=lambda writer: writer.saveAsTable(table), write=write
    )


def _replace(frame: DataFrame, table: str, rows: Rows, options: Mapping[str, str] | None) -> None:
    try:
        overwrite(frame, table, rows, options)
    except Exception as error:
        if _SHARED_FILE not in str(error):
            raise
        try:
            _merge(frame, table, rows)
        except Exception as refused:
            if _UNRESOLVED not in str(refused):
                raise
            msg = (
                f"{table} was compacted, and has the property {_ANY_SCHEMA}, with which Spark "
                "cannot replace single rows: remove it with ALTER TABLE ... UNSET "
                f"TBLPROPERTIES ('{_ANY_SCHEMA}'). New columns need the option mergeSchema alone. "
                "Nothing was written."
            )
            raise ConfigurationError(msg) from refused


def _add_columns(frame: DataFrame, table: str) -> None:
    """Add the new columns of the frame to the table.

    Iceberg itself adds them only to a table that accepts any schema, in which no MERGE works.
    """
    session = frame.sparkSession
    known = {name.lower() for name in session.table(table).columns}
    new = (
        f"{quoted(field.name)} {ddl(field.dataType.jsonValue())}"
        for field in frame.schema
        if field.name.lower() not in known
    )
    session.sql(f"ALTER TABLE {table} ADD COLUMNS ({', '.join(new)})").collect()


def _merge(frame: DataFrame, table: str, rows: Rows) -> None:
    """Replace rows in files that also have rows of other ranges.

    The source has the new rows and, for each range, a row that stands for its old rows. Only these
    match rows of the table, by an equality, so Spark does not compare all rows with all. The
    columns of the source have unique names, so no name has to be qualified with the table.
    """
    expr = functions_of(frame.sparkSession).expr
    marks = {name: f"{_PREFIX}{name}" for name in ("topic", "partition", "start", "until")}
    new = {name: f"{_PREFIX}by_{number}" for number, name in enumerate(frame.columns)}
    replaced = frame.sparkSession.createDataFrame(list(rows.spans), list(marks.values()))
    source = frame.toDF(*new.values()).unionByName(replaced, allowMissingColumns=True)
    merge = source.mergeInto(
        table,
        expr(
            f"({rows.condition()}) AND `topic` = {marks['topic']} "
            f"AND `partition` = {marks['partition']} "
            f"AND `offset` >= {marks['start']} AND `offset` < {marks['until']}"
        ),
    )
    values = {quoted(name): expr(column) for name, column in new.items()}
    merge.whenMatched().delete().whenNotMatched(expr(f"{marks['topic']} IS NULL")).insert(
        values
    ).merge()
