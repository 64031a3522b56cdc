"""Ranges in a Delta Lake table from Arrow, through delta-rs: one commit replaces their rows.

delta-rs overwrites with a filter, as `spark.delta_and_iceberg` does with `replaceWhere`. Its commit
fails if another commit has added rows of the filter, or removed a file with such rows, since the
table was opened, even if the table had no such rows before. An attempt therefore opens the table
first, and the next attempt opens it again.

Opening reads the log of the table, which may take longer than a small commit. So the table of a
successful attempt stays open, and the next call reads only newer commits.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dagster_rebalance.arrow.range_records import RangeRecords
from dagster_rebalance.arrow.records import library, refuse_types
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.outputs.layout import local_folder
from dagster_rebalance.outputs.rows import until_no_conflict
from dagster_rebalance.outputs.scratch import SHOWN_ROWS, current_scratch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dagster_rebalance.core.model.offsets import OffsetRange

_FORM = "Delta Lake"
_ESCAPE = re.compile("%[0-9A-Fa-f]{2}")
_MOST_OPEN = 8
_open: dict[Path | None, tuple[Any, tuple[int, ...] | None]] = {}
"""Open tables on mounted file systems, each with the file of its last commit. A call removes its
table, so no two threads share one."""


def write_delta(
    records: Any,
    table: str | os.PathLike[str],
    ranges: Sequence[OffsetRange],
    *,
    merge_schema: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Write records to a Delta Lake table, replacing ranges that were written before.

    Guarantees and rules are those of `dagster_rebalance.spark.output.write_delta`
    (docs/outputs.md), so a group may move from one to the other on the same table. One commit
    removes the table's rows of the ranges and adds the records. Readers never see a partial write,
    and a writer that is killed before its commit leaves nothing visible. If two runs write a range
    concurrently, the later commit replaces the rows of the earlier one. Memory is bounded. Write
    all records of the ranges in one call.

    Example:
        ```python
        @dg.asset
        def orders(kafka_batch: KafkaBatch) -> None:
            write_delta(kafka_batch.arrow(), "/data/orders", kafka_batch.offset_ranges)
        ```

    Args:
        records: A `pyarrow.RecordBatchReader` such as `kafka_batch.arrow()`, a `pyarrow.Table`, or
            another object with an Arrow stream, with the columns `topic`, `partition` and `offset`.
        table: The path or URI of a table. If it does not exist, it is created, partitioned by
            `topic` and `partition`.
        ranges: The ranges of the records, such as `kafka_batch.offset_ranges`. If there are no
            records of a range, the table has none afterwards. If `ranges` is empty, nothing
            changes.
        merge_schema: Whether the records may have new columns and fields of structs, which are
            added to the table, and may lack some, which are NULL in their rows.
        storage_options: Settings of the object store, by delta-rs's names.

    Raises:
        IllegalStateError: A required column or a column of the table is missing; a column has a
            type that the table could not continue; names differ only in capitals; a record is in
            none of the ranges, or there are records but no ranges. Nothing was written.
        ConfigurationError: delta-rs is missing or refuses the table, or the commit conflicted with
            other writers ten times in a row. Nothing was written.
        BrokerError: Kafka no longer has all of the offsets.
    """
    deltalake = library("deltalake", "delta")
    errors = library("deltalake.exceptions", "delta")
    table, options = os.fspath(table), dict(storage_options or {})
    if _ESCAPE.search(table) and not urlsplit(table).scheme:
        msg = f"delta-rs cannot open {table!r}: give a path without % and two hex digits."
        raise ConfigurationError(msg)
    folder = None if options else local_folder(table)

    with RangeRecords.of(records, table, ranges) as given:
        if given is None:
            return
        place, scratch, columns = table, current_scratch(), given.schema
        if scratch is not None:
            if deltalake.DeltaTable.is_deltatable(table, options):
                columns = deltalake.DeltaTable(table, storage_options=options).schema()
            place, folder, options = scratch.place_of(_FORM, table), None, {}

        def write() -> None:
            opened = _reopened(folder) or _opened(deltalake, place, columns, options)
            stored = library("pyarrow", "delta").schema(opened.schema())
            schema = given.fitted(stored, table, _FORM, merges=merge_schema)
            version = opened.version()
            try:
                with given.reader(schema) as reader:
                    deltalake.write_deltalake(
                        opened,
                        reader,
                        mode="overwrite",
                        predicate=given.rows.condition('"', ""),
                        schema_mode="merge" if merge_schema else None,
                    )
            except errors.CommitFailedError as error:
                opened.update_incremental()
                if opened.version() == version:  # no other writer has committed
                    raise _refused(table, error) from error
                raise
            _keep_open(folder, opened)

        until_no_conflict(table, write, lambda error: isinstance(error, errors.CommitFailedError))
        if scratch is not None:
            made = deltalake.DeltaTable(place).to_pyarrow_table()
            scratch.add(_FORM, table, made.num_rows, made.slice(0, SHOWN_ROWS).to_pylist(), place)


def _refused(table: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"delta-rs cannot commit to {table}: {error}. If it lacks a feature of the table, such as "
        "DEFAULT columns, row tracking, clustering or in-commit timestamps, write with Spark "
        "(dagster_rebalance.spark.output.write_delta), or drop the feature. A table with "
        "delta.appendOnly cannot be written by range. Nothing was written."
    )


def _reopened(folder: Path | None) -> Any:
    """Return the newest version of a table that is still open, or None."""
    opened, commit = _open.pop(folder, (None, None))
    # The commit is compared, because the table may have been removed and created again.
    if opened is None or commit is None or commit != _commit(folder, opened):
        return None
    opened.update_incremental()
    return opened


def _keep_open(folder: Path | None, opened: Any) -> None:
    if folder is not None:
        if len(_open) >= _MOST_OPEN:
            _open.clear()
        _open[folder] = opened, _commit(folder, opened)


def _commit(folder: Path | None, opened: Any) -> tuple[int, ...] | None:
    """Return the identity of the file of a table's last commit, or None if it is gone."""
    if folder is None:
        return None
    try:
        file = (folder / "_delta_log" / f"{opened.version():020}.json").stat()
    except FileNotFoundError:
        return None
    return file.st_dev, file.st_ino, file.st_mtime_ns, file.st_size


def _opened(deltalake: Any, table: str, schema: Any, options: dict[str, str]) -> Any:
    """Open the newest version of a table, which is created if it does not exist."""
    if not deltalake.DeltaTable.is_deltatable(table, options):
        refuse_types(library("pyarrow", "delta").schema(schema), _FORM)
        deltalake.DeltaTable.create(
            table,
            schema,
            mode="ignore",
            partition_by=["topic", "partition"],
            storage_options=options,
        )
    return deltalake.DeltaTable(table, storage_options=options)
