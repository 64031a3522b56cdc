"""Ranges in tables of Delta Lake and Iceberg: one commit replaces the rows of ranges.

The rows of a range are the rows with its topic, partition and offsets, regardless of their writer
and of the ranges that they were written in. No record of earlier writes is kept: one commit removes
and adds the rows, so two writers of a range at any interleaving leave each record once.

Delta Lake overwrites with a filter (`replaceWhere`), and fails the commit if another commit has
added or removed rows of the same table partition since the overwrite began, even if the partition
had no rows before.

In Iceberg, an overwrite with a filter drops whole files. Iceberg evaluates the filter again in each
attempt to commit, so it finds the rows that another writer has just added. It refuses a file that
also has rows of other ranges, as after a compaction. A MERGE then rewrites such files.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.decoding.columns import quoted
from dagster_rebalance.outputs.rows import (
    Rows,
    check_columns,
    rows_without_ranges,
    until_no_conflict,
)
from dagster_rebalance.outputs.scratch import current_scratch
from dagster_rebalance.spark.launch import DELTA_LAKE, coordinates_text
from dagster_rebalance.spark.launch import ICEBERG as ICEBERG_PACKAGES
from dagster_rebalance.spark.ranges import (
    READ_ID,
    READ_RANGES,
    content,
    explained_read_errors,
    functions_of,
    written_once,
)
from dagster_rebalance.spark.schemas import ddl, refuse_ambiguous_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession


_NO_SUCH_FORMAT = re.compile(
    r"DATA_SOURCE_NOT_FOUND|Failed to find (the )?data source|Cannot find catalog plugin class"
    r"|CONFIGURE_SPARK_SESSION_WITH_EXTENSION_AND_CATALOG|REQUIRES_SINGLE_PART_NAMESPACE"
)
_DEFAULT = "CURRENT_DEFAULT"
"""The metadata of a column with a DEFAULT."""
_compared: set[tuple[str, frozenset[str]]] = set()
"""Tables, each with the columns of a frame that had all columns of the table."""
_SHARED_FILE = "Cannot delete file where some, but not all, rows match filter"
_NEW_COLUMNS = "TOO_MANY_DATA_COLUMNS"
_UNRESOLVED = "UNRESOLVED_COLUMN"
_ANY_SCHEMA = "write.spark.accept-any-schema"
_PREFIX = "dagster_rebalance_replaced_"


@dataclass(frozen=True, slots=True)
class TableFormat:
    """A table format: its name in messages and in Spark, and the settings that a session needs.

    `conflict` matches the error of a commit that another commit has prevented.
    """

    name: str
    provider: str
    conflict: re.Pattern[str]
    setup: str


def replace_rows(
    frame: DataFrame,
    table: str,
    ranges: Sequence[OffsetRange],
    form: TableFormat,
    *,
    create: Callable[[DataFrameWriter], None],
    write: Callable[[DataFrame, Rows], None],
    fits: str | None = None,
) -> None:
    """Replace the rows of ranges in a table by the rows of a DataFrame.

    `create` creates a table that does not exist, partitioned by topic and partition, with a writer
    of no rows. `write` makes the single commit that replaces the rows. If outputs are redirected,
    the table that is created has the columns of the table `fits`. Without ranges, the frame must be
    empty. The errors are those of `write_delta`.
    """
    check_columns(frame.columns)
    refuse_ambiguous_names(frame.schema)
    if not ranges:
        _check_empty(frame, table)
        return
    rows = Rows.of(ranges)
    read = _read_metadata(frame)
    _check_read(rows, read)
    if "range_start" in frame.columns:
        frame = frame.withMetadata("range_start", {})  # a table would keep it in its schema
    checked = _checked(frame, rows)
    places = {f"{range_} in {table}" for range_ in ranges}
    model = _existing(frame, fits) if fits is not None and current_scratch() else frame

    def attempt() -> None:
        create(_empty_writer(model, form))
        with explained_read_errors():
            write(checked, rows)

    with written_once(read.get(READ_ID), places):
        try:
            until_no_conflict(
                table, attempt, lambda error: form.conflict.search(str(error)) is not None
            )
        except Exception as error:
            if _NO_SUCH_FORMAT.search(str(error)) is None:
                raise
            msg = f"the Spark session cannot write {table} as a table of {form.name}: "
            raise ConfigurationError(msg + form.setup) from error


def overwrite(
    frame: DataFrame, table: str, rows: Rows, options: Mapping[str, str] | None = None
) -> None:
    """Replace rows of a table by a frame, in one commit."""
    writer = frame.writeTo(table).options(**(options or {}))
    writer.overwrite(functions_of(frame.sparkSession).expr(rows.condition()))


def merges_schema(options: Mapping[str, str] | None) -> bool:
    """Whether the table and the frame may have different columns."""
    given = {key.lower(): value for key, value in (options or {}).items()}
    return str(given.get("mergeschema", "")).lower() == "true"


def _check_empty(frame: DataFrame, table: str) -> None:
    with explained_read_errors():
        is_empty = frame.isEmpty()
    if not is_empty:
        raise rows_without_ranges(table)


def _checked(frame: DataFrame, rows: Rows) -> DataFrame:
    """Return a frame whose write fails at a row outside of the ranges."""
    return frame.where(
        f"if({rows.condition()}, true, raise_error(concat('a row of ', "
        "coalesce(`topic`, 'no topic'), '-', coalesce(string(`partition`), 'no partition'), "
        "' with offset ', coalesce(string(`offset`), 'NULL'), "
        "' is in none of the ranges that are written: nothing was written')))"
    )


def _read_metadata(frame: DataFrame) -> Mapping[str, Any]:
    """Return the metadata of the read that a frame came from."""
    if "range_start" not in frame.columns:
        return {}
    metadata: Mapping[str, Any] = frame.schema["range_start"].metadata
    return metadata


def _check_read(rows: Rows, read: Mapping[str, Any]) -> None:
    """Refuse ranges that the frame was not read from: rows of other writers would be removed."""
    if READ_RANGES not in read:
        return
    spans_of: dict[tuple[str, int], list[tuple[int, int]]] = {}
    read_rows = Rows.of(OffsetRange(**json.loads(text)) for text in read[READ_RANGES])
    for topic, partition, start, until in read_rows.spans:
        spans_of.setdefault((topic, partition), []).append((start, until))
    for topic, partition, start, until in rows.spans:
        spans = spans_of.get((topic, partition), ())
        if not any(first <= start and until <= end for first, end in spans):
            msg = (
                f"the frame was not read from {OffsetRange(topic, partition, start, until)}: the "
                "rows of the table with these offsets would be removed, and none written in their "
                "place. Pass the ranges that the frame was read from. A union of several reads "
                "counts as the first of them: write each read separately, or drop the column "
                "range_start before you write the union."
            )
            raise IllegalStateError(msg)


def _existing(frame: DataFrame, table: str) -> DataFrame:
    """Return no rows with the columns that a table needs; the frame if there is no such table."""
    from pyspark.errors import AnalysisException
    from pyspark.sql.types import StructField, StructType

    session = frame.sparkSession
    try:
        schema = session.table(table).schema
    except AnalysisException:
        return frame
    given = {name.lower() for name in frame.columns}
    needed = [
        StructField(one.name, one.dataType, one.nullable)
        for one in schema
        if one.name.lower() in given or _DEFAULT not in one.metadata
    ]
    return session.createDataFrame([], StructType(needed))


def _empty_writer(frame: DataFrame, form: TableFormat) -> DataFrameWriter:
    """Return a writer of no rows with the frame's columns; the frame is not evaluated."""
    empty = frame.sparkSession.createDataFrame([], frame.schema)
    return empty.write.format(form.provider).mode("ignore").partitionBy("topic", "partition")


DELTA = TableFormat(
    name="Delta Lake",
    provider="delta",
    conflict=re.compile(
        r"DELTA_CONCURRENT_|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED|TABLE_OR_VIEW_ALREADY_EXISTS"
    ),
    setup=(
        f"it needs the package {coordinates_text(DELTA_LAKE)} (setting spark.jars.packages, which "
        "KafkaSparkResource fills in), "
        "spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension, and "
        "spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog. "
        "Give them in spark_config of KafkaSparkResource, or to the Spark Connect server when "
        "it starts."
    ),
)


def write_delta(
    frame: DataFrame,
    table: str,
    ranges: Sequence[OffsetRange],
    *,
    options: Mapping[str, str] | None = None,
) -> None:
    """Write records to a Delta Lake table, replacing ranges that were written before.

    One commit removes the table's rows of the ranges and adds the rows of the DataFrame. Readers
    never see a partial write, and a writer that is killed before its commit leaves nothing visible.
    If two runs write a range concurrently, the later commit replaces the rows of the earlier one.
    The rows of a range are the rows with its topic, partition and offsets, so ranges with other
    bounds also replace each other, and files may be compacted at any time.

    Write all rows of a read to a table in one call. A second call would replace rows of the first,
    and is refused if the frame still has the column `range_start` of `kafka_batch.dataframe()`.
    Ranges that the frame was not read from, such as ranges of a topic that another call writes, are
    also refused.

    Example:
        ```python
        @dg.asset
        def orders(kafka_batch: KafkaBatch, spark: KafkaSparkResource) -> None:
            frame = kafka_batch.dataframe(spark)
            write_delta(frame, "shop.orders", kafka_batch.offset_ranges)
        ```

    Args:
        frame: All rows of the ranges, with the columns `topic`, `partition` and `offset`.
        table: The name or the path of a table (`/data/orders`, `s3a://lake/orders`). If it does not
            exist, it is created, partitioned by `topic` and `partition`.
        ranges: The ranges that the frame was read from: `kafka_batch.offset_ranges`, or the ranges
            that you selected with `ranges=`. If the frame has no rows of a range, the table has
            none afterwards. If `ranges` is empty (the batch has no such topic), nothing changes.
        options: Further options of the write, such as `mergeSchema` or `userMetadata`. With
            `mergeSchema` the frame may have new columns, which are added to the table, and may lack
            columns, which are NULL in its rows.

    Raises:
        IllegalStateError: The frame lacks a required column or a column of the table; names differ
            only in capitals; there are rows but no ranges, or ranges that the frame was not read
            from; or another part of the same read was written to the table before.
        ConfigurationError: The session cannot write Delta Lake tables, or the commit conflicted
            with other writers ten times in a row. Nothing was written.
        BrokerError: Kafka no longer has all of the offsets.
        PySparkException: A row is in none of the ranges. Nothing was written.
    """
    scratch, place = current_scratch(), table
    if scratch is not None:
        place = scratch.place_of(DELTA.name, table)
    is_path = "/" in place
    name = f"delta.{quoted(place)}" if is_path else place

    def write(checked: DataFrame, rows: Rows) -> None:
        if not merges_schema(options):
            _refuse_missing_columns(checked, name)
        overwrite(checked, name, rows, options)

    replace_rows(
        frame,
        table,
        ranges,
        DELTA,
        # By path even after a writer was killed while it created the table: SQL takes any non-empty
        # folder for a table.
        create=lambda writer: writer.save(place) if is_path else writer.saveAsTable(place),
        write=write,
        fits=f"delta.{quoted(table)}" if "/" in table else table,
    )
    if scratch is not None and ranges:
        scratch.add(DELTA.name, table, *content(frame.sparkSession.table(name)), place)


def _refuse_missing_columns(frame: DataFrame, table: str) -> None:
    """Refuse a frame without a column of the table, which Delta Lake would fill with NULL.

    Delta Lake fills a column that has a DEFAULT. The columns of a frame are compared once per
    process, because that reads the table's schema.
    """
    known = (table, frozenset(name.lower() for name in frame.columns))
    if known in _compared:
        return
    missing = [
        column.name
        for column in frame.sparkSession.table(table).schema
        if column.name.lower() not in known[1] and _DEFAULT not in column.metadata
    ]
    if missing:
        msg = (
            f"the records lack the column(s) {', '.join(missing)} of {table}, which would be NULL, "
            "also in ranges that are written again. Keep them in the DataFrame, drop them from the "
            "table, or give options={'mergeSchema': 'true'} if NULL, or a generated value, is "
            "right. Nothing was written."
        )
        raise IllegalStateError(msg)
    _compared.add(known)


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


def write_iceberg(
    frame: DataFrame,
    table: str,
    ranges: Sequence[OffsetRange],
    *,
    options: Mapping[str, str] | None = None,
) -> None:
    """Write records to an Iceberg table, replacing ranges that were written before.

    The guarantees, arguments and errors are those of `write_delta`, except that:

    - `table` is a name with its catalog (`lake.shop.orders`), whose namespace must exist;
    - `options` are, for example, `fanout-enabled` or `snapshot-property.team`. They are ignored if
      a compaction has merged a replaced range with other rows. With `mergeSchema`, new columns of
      the DataFrame are added to the table first;
    - a compacted table with `write.spark.accept-any-schema` raises ConfigurationError.

    The catalog must make commits atomic for all writers, as REST, Hive, Glue and JDBC catalogs do.
    Iceberg's Hadoop catalog does not on object stores. On a mounted file system, its commits are
    atomic only for the writers of one Spark application.
    """
    scratch, place = current_scratch(), table
    if scratch is not None:
        place = _scratch_table(frame.sparkSession, table, scratch.place_of(ICEBERG.name, table))

    def write(checked: DataFrame, rows: Rows) -> None:
        try:
            _replace(checked, place, rows, options)
        except Exception as error:
            if not merges_schema(options) or _NEW_COLUMNS not in str(error):
                raise
            _add_columns(checked, place)
            _replace(checked, place, rows, options)

    replace_rows(
        frame,
        table,
        ranges,
        ICEBERG,
        create=lambda writer: writer.saveAsTable(place),
        write=write,
        fits=table,
    )
    if scratch is not None and ranges:
        scratch.add(ICEBERG.name, table, *content(frame.sparkSession.table(place)), place)


def _scratch_table(session: SparkSession, table: str, folder: str) -> str:
    """Return the name of a table in a catalog that has only a folder."""
    catalog = f"dagster_rebalance_{hashlib.sha256(folder.encode()).hexdigest()[:16]}"
    session.conf.set(f"spark.sql.catalog.{catalog}", "org.apache.iceberg.spark.SparkCatalog")
    session.conf.set(f"spark.sql.catalog.{catalog}.type", "hadoop")
    session.conf.set(f"spark.sql.catalog.{catalog}.warehouse", folder)
    return f"{catalog}.scratch.{quoted(table.rpartition('.')[2].strip('`'))}"


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

    Iceberg itself adds columns only to a table that accepts any schema, in which no MERGE works.
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

    The source has the new rows and one marker row per range for the old rows. Only marker rows
    match rows of the table, by an equality, so Spark does not compare all pairs of rows. The
    columns of the source have unique names, so no name must be qualified with the table.
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
