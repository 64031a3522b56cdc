"""Records in Arrow: their reader, their types, and their rows by range.

Records are read batch by batch and never as a whole.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.outputs.layout import COLUMNS, RangeKey

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

_SHAPES = {
    "int8": "byte",
    "int16": "short",
    "int32": "integer",
    "int64": "long",
    "halffloat": "float",
    "float": "float",
    "double": "double",
}
_STORED = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "float", "double", "string", "binary"}
    | {"date32[day]", "timestamp[us]", "timestamp[us, tz=UTC]"}
)
_CASTS = {
    "uint8": "int16",
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "decimal128(20, 0)",
    "halffloat": "float32",
    "date64": "date32",
    "time32": "string, or to int64",
    "time64": "string, or to int64",
    "duration": "int64",
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


def check_key_types(schema: Any, keys: Iterable[str]) -> None:
    """Raise IllegalStateError if the columns that name a range have other types."""
    types = import_module("pyarrow").types
    for name in keys:
        type_ = schema.field(name).type
        fits = types.is_string(type_) if name == "topic" else types.is_integer(type_)
        if not fits:
            target = "string" if name == "topic" else "int32" if name == "partition" else "int64"
            msg = f"column {name!r} is {type_}: cast it to {target}. Nothing was written."
            raise IllegalStateError(msg)


def cast(batch: Any, schema: Any) -> Any:
    """Return a record batch with the columns of a schema, in its order and types."""
    pa = import_module("pyarrow")
    columns = [batch.column(name) for name in schema.names]
    fitted = []
    for column, field in zip(columns, schema, strict=True):
        if not field.nullable and column.null_count:
            msg = (
                f"column {field.name!r} is NULL in a record, and required in the table. Nothing "
                "was written."
            )
            raise IllegalStateError(msg)
        if column.type == field.type:
            fitted.append(column)
            continue
        # In two steps, because pyarrow has no cast of a dictionary of views to its values.
        values = column.cast(plain(column.type, keeps_dictionaries=True))
        fitted.append(values.cast(field.type))
    return pa.RecordBatch.from_arrays(fitted, schema=schema)


def plain(type_: Any, *, has_int96: bool = False, keeps_dictionaries: bool = False) -> Any:
    """Return the type that Parquet and tables store for a type of Arrow.

    Timestamps have microseconds, as in Spark. A finer value fails its cast. With `has_int96`, the
    type is of a file with timestamps of Spark's old type, which are in UTC and read as nanoseconds.
    """
    pa = import_module("pyarrow")
    types = pa.types
    of = partial(plain, has_int96=has_int96, keeps_dictionaries=keeps_dictionaries)
    if types.is_dictionary(type_):
        values = of(type_.value_type)
        return pa.dictionary(type_.index_type, values) if keeps_dictionaries else values
    if types.is_struct(type_):
        return pa.struct([(field.name, of(field.type)) for field in type_])
    if types.is_map(type_):
        return pa.map_(of(type_.key_type), of(type_.item_type))
    has_items = types.is_nested(type_) and not types.is_run_end_encoded(type_)
    if has_items and hasattr(type_, "value_type"):
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


def refuse_types(fields: Iterable[Any], output: str, further: Collection[str] = ()) -> None:
    """Refuse new columns that an output could not store, or not continue with the same type.

    Each output can have the types that both engines read and write; `further` has more of them.

    Raises:
        IllegalStateError: A column has another type. The message has the type to cast it to.
    """
    for field in fields:
        for name, type_ in _leaves(field.name, field.type):
            if not {str(type_), str(type_).partition("[")[0]} & {*_STORED, *further}:
                msg = (
                    f"column {name!r} is {type_}, and {output} cannot begin a column of this type: "
                    f"cast it to {_cast_for(type_)}. Nothing was written."
                )
                raise IllegalStateError(msg)


def _leaves(name: str, type_: Any) -> Iterator[tuple[str, Any]]:
    types = import_module("pyarrow").types
    if types.is_struct(type_) and type_.num_fields:
        for field in type_:
            yield from _leaves(f"{name}.{field.name}", field.type)
    elif types.is_map(type_):
        yield from _leaves(f"{name}.key", type_.key_type)
        yield from _leaves(f"{name}.value", type_.item_type)
    elif types.is_list(type_):
        yield from _leaves(f"{name}.element", type_.value_type)
    elif not (types.is_decimal128(type_) and 0 <= type_.scale <= type_.precision):
        yield name, type_


def _cast_for(type_: Any) -> str:
    types = import_module("pyarrow").types
    if types.is_decimal(type_):
        return f"decimal128(38, {max(type_.scale, 0)})"
    if types.is_fixed_size_binary(type_):
        return "binary"
    if types.is_run_end_encoded(type_):
        return str(type_.value_type)
    if types.is_null(type_):
        return "the type of its later values, such as string"
    return _CASTS.get(str(type_).partition("[")[0], "string")


def merged(stored: Any, given: Any, *, has_all: bool) -> Any:
    """Return a type of records with the types that a table stores for its parts.

    It has the fields of the records in their order or, with `has_all`, those of the table, followed
    by new ones.
    """
    pa = import_module("pyarrow")
    types, of = pa.types, partial(merged, has_all=has_all)
    if types.is_struct(stored) and types.is_struct(given):
        olds, news = ({one.name: one for one in type_} for type_ in (stored, given))
        fields = []
        for name in {**olds, **news} if has_all else news:
            field = olds.get(name) or news[name]
            type_ = of(field.type, news[name].type) if name in news else field.type
            fields.append(pa.field(name, type_, field.nullable))
        return pa.struct(fields)
    if types.is_map(stored) and types.is_map(given):
        return pa.map_(of(stored.key_type, given.key_type), of(stored.item_type, given.item_type))
    if types.is_list(stored) and types.is_list(given):
        type_ = of(stored.value_type, given.value_type)
        return pa.list_(stored.value_field.with_type(type_))
    return stored


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
