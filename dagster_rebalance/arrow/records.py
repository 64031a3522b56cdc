"""Records in Arrow: their reader, their types, and their rows by range.

Records are read batch by batch and never as a whole.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.outputs.layout import COLUMNS, RangeKey

_SHAPES = {
    "int8": "byte",
    "int16": "short",
    "int32": "integer",
    "int64": "long",
    "halffloat": "float",
    "float": "float",
    "double": "double",
}


def library(name: str, extra: str) -> Any:
    """Import a module of an extra."""
    try:
        return import_module(name)
    except ImportError as problem:
        msg = (
            f"this output needs the extra {extra}: install it with `pip install "
            f"'dagster-rebalance[{extra}]'` ({problem})"
        )
        raise ConfigurationError(msg) from problem


def opened(records: Any) -> Any:
    """Return a `RecordBatchReader` of records with the plain types of their columns.

    A reader of pyarrow is not read through the C interface, which would lose the class of an error.
    """
    pa = library("pyarrow", "arrow")
    if isinstance(records, pa.RecordBatchReader):
        reader = records
    elif hasattr(records, "__arrow_c_stream__"):
        reader = pa.RecordBatchReader.from_stream(records)
    else:
        msg = (
            f"the records are a {type(records).__name__}: give a pyarrow.RecordBatchReader, such "
            "as kafka_batch.arrow(), a pyarrow.Table, or another object with an Arrow stream."
        )
        raise ConfigurationError(msg)
    schema = pa.schema([(field.name, plain(field.type)) for field in reader.schema])
    batches = (cast(batch, schema) for batch in reader)
    return pa.RecordBatchReader.from_batches(schema, batches)


def cast(batch: Any, schema: Any) -> Any:
    """Return a record batch with the columns of a schema, in its order and types."""
    pa = import_module("pyarrow")
    columns = [batch.column(name) for name in schema.names]
    fitted = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(fitted, schema=schema)


def plain(type_: Any, *, has_int96: bool = False) -> Any:
    """Return the type that Parquet and tables store for a type of Arrow.

    Timestamps have microseconds, as in Spark. A finer value fails its cast. With `has_int96`, the
    type is of a file with timestamps of Spark's old type, which are in UTC and read as nanoseconds.
    """
    pa = import_module("pyarrow")
    types, of = pa.types, partial(plain, has_int96=has_int96)
    if types.is_dictionary(type_):
        return of(type_.value_type)
    if types.is_struct(type_):
        return pa.struct([(field.name, of(field.type)) for field in type_])
    if types.is_map(type_):
        return pa.map_(of(type_.key_type), of(type_.item_type))
    if types.is_nested(type_) and hasattr(type_, "value_type"):
        return pa.list_(of(type_.value_type))
    if types.is_timestamp(type_):
        is_utc = type_.tz is not None or (has_int96 and type_.unit == "ns")
        return pa.timestamp("us", "UTC" if is_utc else None)
    return {
        pa.large_string(): pa.string(),
        pa.string_view(): pa.string(),
        pa.large_binary(): pa.binary(),
        pa.binary_view(): pa.binary(),
    }.get(type_, type_)


def shape(type_: Any) -> Any:
    """Return the shape of a plain type, as `outputs.columns` compares it."""
    types = import_module("pyarrow").types
    if types.is_struct(type_):
        return tuple((field.name, shape(field.type)) for field in type_)
    if types.is_map(type_):
        return ["map", shape(type_.key_type), shape(type_.item_type)]
    if types.is_list(type_):
        return ["array", shape(type_.value_type)]
    if types.is_decimal(type_):
        return f"decimal({type_.precision},{type_.scale})"
    return _SHAPES.get(str(type_), str(type_))


def shapes(schema: Any) -> dict[str, tuple[Any, str]]:
    """Return the shape and the type in messages of each column."""
    return {field.name: (shape(field.type), str(field.type)) for field in schema}


def by_range(batch: Any) -> list[tuple[RangeKey, Any]]:
    """Return the rows of each range in a record batch, in their order."""
    pa = import_module("pyarrow")
    keys = pa.Table.from_batches([batch]).select(COLUMNS)
    keys = keys.append_column("row", pa.array(range(batch.num_rows), pa.int64()))
    grouped = keys.group_by(list(COLUMNS), use_threads=False).aggregate([("row", "list")])
    groups = grouped.combine_chunks().to_batches()
    found = []
    for group in groups:
        rows = group.column("row_list")
        for index, values in enumerate(zip(*(group.column(name) for name in COLUMNS), strict=True)):
            key = RangeKey(*(value.as_py() for value in values))
            if None in key:
                msg = "a record has no topic, partition, range_start or range_until"
                raise IllegalStateError(msg)
            is_only = grouped.num_rows == 1
            found.append((key, batch if is_only else batch.take(rows[index].values)))
    return found
