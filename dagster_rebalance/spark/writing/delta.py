"""Output by range in tables of Delta Lake, by an overwrite with a filter (`replaceWhere`).

Delta Lake fails that commit if another one has added or removed rows of the same table partition
since it began, also where there were none before.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.decoding.columns import quoted
from dagster_rebalance.spark.session.connector import DELTA_LAKE, coordinates_text
from dagster_rebalance.spark.writing.tables import (
    TableFormat,
    merges_schema,
    overwrite,
    replace_rows,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame

    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.spark.writing.tables import Rows

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

_DEFAULT = "CURRENT_DEFAULT"
"""The metadata of a column with a DEFAULT."""
_compared: set[tuple[str, frozenset[str]]] = set()
"""Tables, and the columns of frames that had all of theirs."""


def write_delta(
    frame: DataFrame,
    table: str,
    ranges: Sequence[OffsetRange],
    *,
    options: Mapping[str, str] | None = None,
) -> None:
    """Write records to a table of Delta Lake, replacing ranges that were written before.

    One commit of the table removes its rows of the ranges and adds the rows of the frame. Readers
    never see a partial write, and a writer that is killed before its commit leaves nothing visible.
    If two runs write a range concurrently, the later commit replaces the rows of the earlier one.
    The rows of a range are those with its topic, partition and offsets, so ranges with other bounds
    replace each other too, and files may be compacted at any time.

    Write a read to one table in one call. A second part of it would replace the first, and is
    refused if the frame still has the column `range_start` of `kafka_batch.dataframe()`. Ranges
    that the frame was not read from, such as those of a topic that another call writes, are refused
    too.

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
        ranges: The ranges that the frame was read from: `kafka_batch.offset_ranges`, or those
            selected with `ranges=`. A range without rows in the frame has none in the table
            afterwards. Without ranges, for a topic that the batch does not contain, nothing
            changes.
        options: Further options of the write, such as `mergeSchema` or `userMetadata`. With
            `mergeSchema` the frame may have new columns, which are added to the table, and lack
            others, which are NULL in its rows.

    Raises:
        IllegalStateError: A column is missing, also one of the table; names differ only in
            capitals; there are rows and no ranges, or others than the frame was read from; or
            another part of the same read was written to the table before.
        ConfigurationError: The session cannot write tables of Delta Lake, or the commit conflicted
            with other writers ten times in a row. Nothing was written.
        BrokerError: Kafka no longer has all of the offsets.
        PySparkException: A row is in none of the ranges. Nothing was written.
    """
    is_path = "/" in table
    name = f"delta.{quoted(table)}" if is_path else table

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
        create=lambda writer: writer.save(table) if is_path else writer.saveAsTable(table),
        write=write,
    )


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
