"""Ranges in an Iceberg table from Arrow, through pyiceberg: one transaction replaces their rows.

A transaction deletes the rows of the ranges and appends the records. Its commit replaces the newest
snapshot that it has seen. If another commit came first, pyiceberg compares the filter of the delete
with the files that the other one has added, and fails if they may have rows of the filter. Only the
isolation level `serializable` does this, so a table with another one is refused.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from dagster_rebalance.arrow.range_records import RangeRecords
from dagster_rebalance.arrow.records import library, plain, refuse_types
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.outputs.layout import local_folder
from dagster_rebalance.outputs.rows import COLUMNS, until_no_conflict
from dagster_rebalance.outputs.scratch import SHOWN_ROWS, current_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.outputs.rows import Rows

_FORM = "Iceberg"
_FURTHER_TYPES = ("halffloat", "time64[us]", "fixed_size_binary", "extension<arrow.uuid>")
_CHUNK_BYTES = 64 << 20
"""The size of the records of one data file per partition."""
_ISOLATION = "write.delete.isolation-level"
_SERIALIZABLE = "serializable"


def write_iceberg(
    records: Any,
    table: str,
    ranges: Sequence[OffsetRange],
    *,
    catalog: Any,
    merge_schema: bool = False,
) -> None:
    """Write records to an Iceberg table, replacing ranges that were written before.

    Guarantees and rules are those of `dagster_rebalance.spark.output.write_iceberg`
    (docs/outputs.md). The current snapshot of the table has all records of the ranges or those of
    before, and a writer that is killed before its commit leaves nothing visible. If two runs write
    a range concurrently, the later commit replaces the rows of the earlier one. Memory is bounded.
    Write all records of the ranges in one call.

    Moving a group between Spark and Arrow on the same table is tested for Parquet and Delta Lake.
    For Iceberg it is untested, and needs a catalog that both use.

    Example:
        ```python
        @dg.asset
        def orders(kafka_batch: KafkaBatch) -> None:
            write_iceberg(
                kafka_batch.arrow(),
                "shop.orders",
                kafka_batch.offset_ranges,
                catalog=load_catalog("lake"),
            )
        ```

    Args:
        records: A `pyarrow.RecordBatchReader` such as `kafka_batch.arrow()`, a `pyarrow.Table`, or
            another object with an Arrow stream, with the columns `topic`, `partition` and `offset`.
        table: The name of the table in the catalog, with its namespace, which must exist. If the
            table does not exist, it is created, partitioned by `topic` and `partition`.
        ranges: The ranges of the records, such as `kafka_batch.offset_ranges`. If there are no
            records of a range, the table has none afterwards. If `ranges` is empty, nothing
            changes.
        catalog: The catalog of pyiceberg, such as `load_catalog("lake")`.
        merge_schema: Whether the records may have new columns and fields of structs, which are
            added to the table, and may lack some, which are NULL in their rows.

    Raises:
        IllegalStateError: A required column or a column of the table is missing; a column has a
            type that the table could not continue; names differ only in capitals; a record is in
            none of the ranges, or there are records but no ranges. Nothing was written.
        ConfigurationError: pyiceberg is missing or cannot write to the table, the table has an
            isolation level other than serializable, or the commit conflicted with other writers ten
            times in a row. Nothing was written.
        BrokerError: Kafka no longer has all of the offsets.
    """
    errors = library("pyiceberg.exceptions", "iceberg")
    conflicts = (errors.CommitFailedException, errors.ValidationException)
    scratch = current_scratch()
    with RangeRecords.of(records, table, ranges) as given:
        if given is None:
            return
        if scratch is not None:
            catalog = _scratch_catalog(catalog, table, scratch.place_of(_FORM, table), given)
        until_no_conflict(
            table,
            lambda: _write(catalog, table, given, merge_schema=merge_schema),
            lambda error: isinstance(error, conflicts),
        )
    if scratch is not None:
        made = catalog.load_table(table)
        rows = made.scan().to_arrow()
        shown = rows.slice(0, SHOWN_ROWS).to_pylist()
        scratch.add(_FORM, table, rows.num_rows, shown, made.location())


def _scratch_catalog(catalog: Any, name: str, folder: str, given: RangeRecords) -> Any:
    """Return a catalog in a folder with a table that has the columns and properties of a table."""
    errors = library("pyiceberg.exceptions", "iceberg")
    try:
        table = catalog.load_table(name)
    except errors.NoSuchTableError:
        refuse_types(given.schema, _FORM, _FURTHER_TYPES)
        columns, properties = given.schema, {}
    else:
        columns, properties = table.schema().as_arrow(), table.properties
    local = local_folder(folder)
    if local is None:
        msg = (
            f"a table of Iceberg cannot be redirected to {folder}: name a scratch folder of a "
            "mounted file system"
        )
        raise ConfigurationError(msg)
    local.mkdir(exist_ok=True)
    own = library("pyiceberg.catalog.sql", "iceberg").SqlCatalog(
        "scratch", uri=f"sqlite:///{local}/catalog.db", warehouse=local.as_uri()
    )
    own.create_namespace_if_not_exists(own.namespace_from(name))
    if not own.table_exists(name):
        isolation = {key: properties[key] for key in properties.keys() & {_ISOLATION}}
        own.create_table(name, columns, properties=isolation)
    return own


def _write(catalog: Any, name: str, given: RangeRecords, *, merge_schema: bool) -> None:
    """Replace the rows of ranges; explain what pyiceberg cannot write."""
    errors = library("pyiceberg.exceptions", "iceberg")
    try:
        try:
            _replace(catalog, name, given, merge_schema=merge_schema)
        except OverflowError:  # a time that Python's datetime does not have
            _replace(catalog, name, given, merge_schema=merge_schema, has_time_bounds=False)
    except (NotImplementedError, ValueError, errors.NotInstalledError) as error:
        msg = (
            f"pyiceberg cannot write to the table {name}: {error}. Change this property of the "
            "table, or write with Spark (dagster_rebalance.spark.output.write_iceberg). Nothing "
            "was written."
        )
        raise ConfigurationError(msg) from error


def _replace(
    catalog: Any,
    name: str,
    given: RangeRecords,
    *,
    merge_schema: bool,
    has_time_bounds: bool = True,
) -> None:
    pa = library("pyarrow", "iceberg")
    table = _loaded(catalog, name, given.schema)
    isolation = table.properties.get(_ISOLATION, _SERIALIZABLE)
    if isolation != _SERIALIZABLE:
        msg = (
            f"the table {name} has {_ISOLATION}={isolation}, with which two writers of a range "
            f"could double it: set it to {_SERIALIZABLE}, or remove it. Nothing was written."
        )
        raise ConfigurationError(msg)
    stored = pa.schema(
        [(one.name, plain(one.type), one.nullable) for one in table.schema().as_arrow()]
    )
    schema = given.fitted(stored, name, _FORM, merges=merge_schema, further=_FURTHER_TYPES)
    with given.reader(schema) as reader, table.transaction() as transaction:
        if merge_schema and any(one not in stored for one in schema):
            with transaction.update_schema() as update:
                update.union_by_name(schema)
        # A range that is written for the first time has no rows. Not catch_warnings, which threads
        # share.
        warnings.filterwarnings("ignore", "Delete operation did not match any records")
        with nullcontext() if has_time_bounds else _without_time_bounds(transaction):
            transaction.delete(_condition(given.rows))
            for chunk in _chunks(reader):
                transaction.append(chunk)


@contextmanager
def _without_time_bounds(transaction: Any) -> Iterator[None]:
    """Let pyiceberg keep no smallest and largest times of the files that it writes."""
    types = library("pyiceberg.types", "iceberg")
    times = (types.DateType, types.TimestampType, types.TimestamptzType)
    schema, before = transaction.table_metadata.schema(), transaction.table_metadata.properties
    modes = {
        f"write.metadata.metrics.column.{name}": "counts"
        for name in schema.column_names
        if isinstance(schema.find_field(name).field_type, times)
    }
    transaction.set_properties(modes)
    yield
    transaction.remove_properties(*modes)
    transaction.set_properties({name: before[name] for name in modes if name in before})


def _loaded(catalog: Any, name: str, schema: Any) -> Any:
    """Return the newest state of a table, which is created if it does not exist."""
    errors = library("pyiceberg.exceptions", "iceberg")
    try:
        return catalog.load_table(name)
    except errors.NoSuchTableError:
        refuse_types(schema, _FORM, _FURTHER_TYPES)
    try:
        with (
            catalog.create_table_transaction(name, schema) as transaction,
            transaction.update_spec() as spec,
        ):
            spec.add_identity("topic")
            spec.add_identity("partition")
    except errors.TableAlreadyExistsError:
        pass  # by another writer, at the same time
    return catalog.load_table(name)


def _condition(rows: Rows) -> Any:
    """Return an expression that is true for the rows of ranges."""
    of = library("pyiceberg.expressions", "iceberg")
    topic_, partition_, offset_ = COLUMNS
    spans = [
        of.And(
            of.EqualTo(topic_, topic),
            of.EqualTo(partition_, partition),
            of.GreaterThanOrEqual(offset_, start),
            of.LessThan(offset_, until),
        )
        for topic, partition, start, until in rows.spans
    ]
    return spans[0] if len(spans) == 1 else of.Or(*spans)


def _chunks(reader: Any) -> Iterator[Any]:
    """Yield records as tables of limited size."""
    pa = library("pyarrow", "iceberg")
    waiting: list[Any] = []
    for batch in reader:
        waiting.append(batch)
        if sum(one.nbytes for one in waiting) > _CHUNK_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)
