"""Schemas that fit the Parquet files of an output, and ambiguous names."""

from __future__ import annotations

import pytest
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from dagster_rebalance import IllegalStateError
from dagster_rebalance.spark.schemas import ddl, refuse_ambiguous_names, refuse_misfits


def struct(**types: DataType) -> StructType:
    return StructType([StructField(name, type_) for name, type_ in types.items()])


INT, LONG, TEXT = IntegerType(), LongType(), StringType()


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        (struct(id=INT, Id=INT), "'id' and 'Id'"),
        (struct(a=struct(b=INT, B=INT)), "'a.b' and 'a.B'"),
        (struct(a=ArrayType(struct(b=INT, B=INT))), "'a.b' and 'a.B'"),
        (struct(a=MapType(TEXT, struct(é=INT, É=INT))), "'a.é' and 'a.É'"),
    ],
    ids=["columns", "struct", "array", "map"],
)
def test_names_that_differ_in_capitals_are_refused(schema: StructType, names: str) -> None:
    with pytest.raises(IllegalStateError, match=names):
        refuse_ambiguous_names(schema)


def test_same_name_in_different_structs_is_accepted() -> None:
    refuse_ambiguous_names(struct(a=struct(b=INT), B=struct(b=INT)))


@pytest.mark.parametrize(
    ("now", "then"),
    [
        (INT, LONG),
        (ByteType(), INT),
        (FloatType(), DoubleType()),
        (DecimalType(10, 2), DecimalType(12, 4)),
        (struct(a=INT, b=TEXT), struct(a=LONG, b=TEXT)),
        (ArrayType(INT, containsNull=False), ArrayType(LONG)),
        (MapType(TEXT, INT), MapType(TEXT, LONG)),
        (TEXT, TEXT),
    ],
    ids=lambda one: one.simpleString(),
)
def test_narrower_type_fits(now: DataType, then: DataType) -> None:
    refuse_misfits(struct(x=now), struct(x=then), "out")


@pytest.mark.parametrize(
    ("now", "then"),
    [
        (LONG, INT),
        (INT, DoubleType()),
        (INT, TEXT),
        (TimestampType(), TimestampNTZType()),
        (DecimalType(10, 2), DecimalType(10, 4)),
        (struct(a=INT, b=INT), struct(b=INT, a=INT)),
        (struct(a=INT), struct(a=INT, b=INT)),
        (ArrayType(TEXT), ArrayType(INT)),
        (MapType(TEXT, TEXT), ArrayType(TEXT)),
        (struct(a=INT), TEXT),
    ],
    ids=lambda one: one.simpleString(),
)
def test_other_type_is_refused(now: DataType, then: DataType) -> None:
    with pytest.raises(IllegalStateError, match=r"column 'x' is .*, and .* in the files"):
        refuse_misfits(struct(x=now), struct(x=then), "out")


def test_at_most_five_differences_are_named() -> None:
    new = struct(a=INT, **{f"c{number}": INT for number in range(9)})
    with pytest.raises(
        IllegalStateError, match=r"'b' is missing; column 'c0' is new; .*; and 5 more\. Readers"
    ):
        refuse_misfits(new, struct(a=INT, b=INT), "out")


def test_ddl_quotes_field_names() -> None:
    type_ = struct(x=struct(**{"order-id": MapType(TEXT, ArrayType(LONG))})).jsonValue()
    assert ddl(type_) == "STRUCT<`x`: STRUCT<`order-id`: MAP<string, ARRAY<bigint>>>>"
