"""Output keyed by range in a table of Iceberg.

Owns the one commit that replaces ranges there, and which of Iceberg's errors mean that another
commit was first. There are two ways to that commit. An overwrite by filter drops whole files:
Iceberg looks for them anew in each attempt to commit, and so finds what another writer has just
added. It refuses where a file has rows of other ranges, too, as after a compaction. There a MERGE
writes such files anew without the rows.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.decoding.columns import quoted
from dagster_rebalance.spark.session.connector import ICEBERG as ICEBERG_PACKAGES
from dagster_rebalance.spark.session.connector import coordinates_text
from dagster_rebalance.spark.writing.schemas import ddl
from dagster_rebalance.spark.writing.tables import (
    Rows,
    TableFormat,
    merges_schema,
    overwrite,
    replace_rows,
    sql_column,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame

    from dagster_rebalance.core.model.offsets import OffsetRange

ICEBERG = TableFormat(
    name="Iceberg",
    provider="iceberg",
    overtaken=re.compile(
        r"CommitFailedException|Found conflicting files|AlreadyExistsException"
        r"|TABLE_OR_VIEW_ALREADY_EXISTS|Missing required files to delete|FIELD_ALREADY_EXISTS"
    ),
    setup=(
        f"it needs the package {coordinates_text(ICEBERG_PACKAGES)} (setting spark.jars.packages, "
        "which KafkaSparkResource fills in), a catalog (spark.sql.catalog.lake="
        "org.apache.iceberg.spark.SparkCatalog, and what that one needs), and a table in that "
        "catalog (lake.shop.orders). Give them in spark_config of KafkaSparkResource, or to the "
        "Spark Connect server when it starts."
    ),
)
_SHARED_FILE = "Cannot delete file where some, but not all, rows match filter"
_NEW_COLUMNS = "TOO_MANY_DATA_COLUMNS"
_UNRESOLVED = "UNRESOLVED_COLUMN"
_ANY_SCHEMA = "write.spark.accept-any-schema"
_MARK = "dagster_rebalance_replaced_"


def write_iceberg(
    frame: DataFrame,
    table: str,
    ranges: Sequence[OffsetRange],
    *,
    options: Mapping[str, str] | None = None,
) -> None:
    """Write records to a table of Iceberg, so that ranges that are written again are replaced.

    It promises what `write_delta` does, and takes the same. The catalog must make commits atomic
    for all writers, as REST, Hive, Glue and JDBC catalogs do: Iceberg's Hadoop catalog does not on
    object stores, and on a mounted file system only within one Spark.

    Args:
        frame: All rows of the ranges, with the columns `topic`, `partition` and `offset`.
        table: Its name, with that of its catalog (`lake.shop.orders`). It is made if it is missing,
            partitioned by `topic` and `partition`; its namespace is not.
        ranges: The ranges that the frame was read from: `kafka_batch.offset_ranges`, or those
            that `ranges=` has chosen of them. A range of which the frame has no row has none in
            the table afterwards. No ranges at all, as of a topic that the batch has nothing of,
            change nothing.
        options: Further options of the write, such as `fanout-enabled` or `snapshot-property.team`.
            The write of a range into compacted files has none of them. With `mergeSchema` the
            table gets the new columns of the frame first.

    Raises:
        IllegalStateError: A column is missing; names differ only in capitals; there are rows and
            no ranges, or others than the frame was read from; or another part of the same read was
            written to the table before.
        ConfigurationError: The session cannot write tables of Iceberg; the table accepts any
            schema and was compacted; or other writers were faster ten times in a row. Nothing was
            written.
        BrokerError: Kafka no longer has all of the offsets.
        PySparkException: A row is of none of the ranges. Nothing was written.
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
        frame,
        table,
        ranges,
        ICEBERG,
        create=lambda writer: writer.saveAsTable(table),
        write=write,
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
                "cannot replace single rows: take it away with ALTER TABLE ... UNSET "
                f"TBLPROPERTIES ('{_ANY_SCHEMA}'). New columns need the option mergeSchema alone. "
                "Nothing was written."
            )
            raise ConfigurationError(msg) from refused


def _add_columns(frame: DataFrame, table: str) -> None:
    """Add the columns of the frame that the table has not.

    Iceberg would do that itself in a table that accepts any schema, in which no MERGE works.
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
    """Replace rows of files that have others, too.

    The source has the new rows and, for each range, a row that stands for its old rows. Only these
    match rows of the table, and by an equality, so that Spark does not compare all with all. The
    columns of the source have names that no table has, so no name needs the table's before it.
    """
    marks = {name: f"{_MARK}{name}" for name in ("topic", "partition", "start", "until")}
    new = {name: f"{_MARK}by_{number}" for number, name in enumerate(frame.columns)}
    replaced = frame.sparkSession.createDataFrame(list(rows.spans), list(marks.values()))
    source = frame.toDF(*new.values()).unionByName(replaced, allowMissingColumns=True)
    merge = source.mergeInto(
        table,
        sql_column(
            frame,
            f"({rows.condition()}) AND `topic` = {marks['topic']} "
            f"AND `partition` = {marks['partition']} "
            f"AND `offset` >= {marks['start']} AND `offset` < {marks['until']}",
        ),
    )
    values = {quoted(name): sql_column(frame, column) for name, column in new.items()}
    merge.whenMatched().delete().whenNotMatched(
        sql_column(frame, f"{marks['topic']} IS NULL")
    ).insert(values).merge()
