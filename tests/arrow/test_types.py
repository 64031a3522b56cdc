"""Types and names of columns: what an output begins, continues and refuses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

from dagster_rebalance import ConfigurationError, IllegalStateError
from dagster_rebalance.arrow.output import write_delta, write_parquet_by_range
from dagster_rebalance.outputs import rows as conflicts
from tests.arrow.given import SCHEMA, expected, records, span
from tests.arrow.sinks import READERS, WRITERS, catalog_in, rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIRST, SECOND = span(0, 2), span(2, 4)
KINDS = ("parquet", "delta", "iceberg")
TABLES = ("delta", "iceberg")


def place_in(kind: str, folder: Path) -> str:
    place = str(folder / "out")
    if kind == "iceberg":
        catalog_in(place)
    return place


def with_column(range_: Any, values: Any, name: str = "more") -> Any:  # noqa: ANN401
    return records(range_).append_column(name, values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("values", "kinds", "target"),
    [
        (pa.nulls(2), KINDS, "type of its later values"),
        (pa.array([{"a": None}] * 2, pa.struct([("a", pa.null())])), KINDS, "later values"),
        (pa.array([2**32 - 1] * 2, pa.uint32()), TABLES, pa.int64()),
        (pa.array([2**64 - 1] * 2, pa.uint64()), TABLES, pa.decimal128(20)),
        (pa.array([0, 86_400_000], pa.date64()), KINDS, pa.date32()),
        (pa.array([0, 1], pa.time32("s")), KINDS, pa.string()),
        (pa.array([0, 1], pa.duration("us")), KINDS, pa.int64()),
        (pa.array([b"ab"] * 2, pa.binary(2)), ("delta",), pa.binary()),
        (pa.array([0.5, 1], pa.float16()), ("parquet", "delta"), pa.float32()),
        (pa.array([1, 2], pa.decimal256(60, 2)), KINDS, pa.decimal128(38, 2)),
        (pa.array([{}] * 2, pa.struct([])), KINDS, "string"),
    ],
    ids=str,
)
def test_column_that_could_not_be_continued_is_refused_before_the_output_exists(
    kind: str,
    tmp_path: Path,
    values: Any,  # noqa: ANN401
    kinds: tuple[str, ...],
    target: Any,  # noqa: ANN401
) -> None:
    place, write = place_in(kind, tmp_path), WRITERS[kind]
    refused = kind in kinds
    if refused:
        name = {pa.date32(): "date32", pa.float32(): "float32"}.get(target, str(target))
        reason = f"cannot begin a column of this type: cast it to .*{re.escape(name)}"
        with pytest.raises(IllegalStateError, match=reason):
            write(with_column(FIRST, values), place, [FIRST])
        values = pa.array(["a", "b"]) if isinstance(target, str) else values.cast(target)
    for range_ in (FIRST, SECOND):
        write(with_column(range_, values), place, [range_])
    assert READERS[kind](place)["more"].to_pylist() == 2 * values.to_pylist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("values", "nulls"),
    [
        (pa.array(["a", "b"]), pa.nulls(2)),
        (pa.array([{"a": 1}] * 2), pa.nulls(2)),
        (pa.array([["a"]] * 2), pa.array([[], [None]], pa.list_(pa.null()))),
        (pa.array([{"a": 1}] * 2), pa.array([{"a": None}] * 2, pa.struct([("a", pa.null())]))),
    ],
    ids=["text", "struct", "in a list", "in a struct"],
)
def test_column_of_nulls_continues_a_column_of_any_type(
    kind: str,
    tmp_path: Path,
    values: Any,  # noqa: ANN401
    nulls: Any,  # noqa: ANN401
) -> None:
    place, write = place_in(kind, tmp_path), WRITERS[kind]
    write(with_column(FIRST, values), place, [FIRST])
    write(with_column(SECOND, nulls), place, [SECOND])
    found = READERS[kind](place).sort_by("offset")["more"].to_pylist()
    assert found == values.to_pylist() + nulls.to_pylist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_", [pl.Categorical, pl.Enum(["a"])])
def test_categories_of_polars_are_text(kind: str, tmp_path: Path, type_: Any) -> None:  # noqa: ANN401
    place = place_in(kind, tmp_path)
    frame = pl.from_arrow(records(FIRST))
    assert isinstance(frame, pl.DataFrame)
    frame = frame.with_columns(one=pl.col("value").cast(type_))
    frame = frame.with_columns(many=pl.concat_list("one"), part=pl.struct("one"))
    WRITERS[kind](frame, place, [FIRST])
    found = READERS[kind](place).select(["one", "many", "part"]).to_pylist()
    assert found == [{"one": "a", "many": ["a"], "part": {"one": "a"}}] * 2


@pytest.mark.parametrize("kind", TABLES)
def test_new_field_of_a_struct_is_added_with_merge_schema(kind: str, tmp_path: Path) -> None:
    place, write = place_in(kind, tmp_path), WRITERS[kind]
    write(with_column(FIRST, pa.array([{"a": 1, "z": [{"b": 1}]}] * 2)), place, [FIRST])
    more = pa.array([{"n": "x", "z": [{"b": 2, "c": 3}]}] * 2)
    with pytest.raises(IllegalStateError, match=r"With merge_schema=True new"):
        write(with_column(SECOND, more), place, [SECOND])
    for _ in range(2):
        write(with_column(SECOND, more), place, [SECOND], merge_schema=True)
    found = READERS[kind](place).sort_by("offset")["more"].to_pylist()
    first = {"a": 1, "z": [{"b": 1, "c": None}], "n": None}
    assert found == [first] * 2 + [{"a": None, "z": [{"b": 2, "c": 3}], "n": "x"}] * 2
    other = pa.array([{"a": "text"}] * 2)
    with pytest.raises(IllegalStateError, match=r"'more' is struct.*Cast these columns"):
        write(with_column(SECOND, other), place, [SECOND], merge_schema=True)
    unsigned = pa.array([{"u": 1}] * 2, pa.struct([("u", pa.uint8())]))
    with pytest.raises(IllegalStateError, match=r"'more\.u' is uint8.*cast it to int16"):
        write(with_column(SECOND, unsigned), place, [SECOND], merge_schema=True)


@pytest.mark.parametrize("kind", TABLES)
def test_new_name_that_differs_only_in_capitals_is_refused(kind: str, tmp_path: Path) -> None:
    place, write = place_in(kind, tmp_path), WRITERS[kind]
    write(with_column(FIRST, pa.array([{"a": 1}] * 2)), place, [FIRST])
    for changed in (
        records(SECOND).rename_columns({"value": "Value"}),
        with_column(SECOND, pa.array([{"A": 1}] * 2)),
    ):
        with pytest.raises(IllegalStateError, match="differ only in capitals"):
            write(changed, place, [SECOND], merge_schema=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda table: table.append_column("value", [["b"] * 2]), "two columns 'value'"),
        (
            lambda table: table.set_column(1, "partition", pa.array([0.0, 0.0])),
            "column 'partition' is double: cast it to int32",
        ),
        (
            lambda table: table.set_column(0, "topic", pa.array([1, 1])),
            "column 'topic' is int64: cast it to string",
        ),
    ],
    ids=["twice", "partition", "topic"],
)
def test_column_that_cannot_name_a_range_is_refused(
    kind: str, tmp_path: Path, changed: Callable[[Any], Any], reason: str
) -> None:
    with pytest.raises(IllegalStateError, match=reason):
        WRITERS[kind](changed(records(FIRST)), place_in(kind, tmp_path), [FIRST])


def test_path_object_is_taken(tmp_path: Path) -> None:
    write_delta(records(FIRST), tmp_path / "table", [FIRST])
    assert write_parquet_by_range(records(FIRST), tmp_path / "files") == 2
    assert rows("delta", str(tmp_path / "table")) == expected((0, 2, "a"))
    assert rows("parquet", str(tmp_path / "files")) == expected((0, 2, "a"))


def test_delta_path_that_delta_rs_would_unquote_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="without % and two hex digits"):
        write_delta(records(FIRST), str(tmp_path / "a%20b"), [FIRST])
    assert list(tmp_path.iterdir()) == []


def test_commit_that_delta_rs_refuses_is_no_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "out")
    DeltaTable.create(place, SCHEMA, configuration={"delta.appendOnly": "true"})
    monkeypatch.setattr(conflicts, "pause", lambda _attempt: pytest.fail("tried again"))
    with pytest.raises(ConfigurationError, match=r"cannot commit to .*append-only.*with Spark"):
        write_delta(records(FIRST), place, [FIRST])
    assert rows("delta", place) == []


def iceberg_table(place: str, **settings: Any) -> Any:  # noqa: ANN401
    return catalog_in(place).create_table("shop.orders", **settings)


def test_required_column_of_an_iceberg_table_is_written(tmp_path: Path) -> None:
    place, write = str(tmp_path / "out"), WRITERS["iceberg"]
    text, long_ = StringType(), LongType()
    columns = [
        NestedField(1, "topic", text, required=True),
        NestedField(2, "partition", IntegerType(), required=True),
        NestedField(3, "offset", long_, required=True),
        NestedField(4, "value", text, required=True),
        NestedField(5, "range_start", long_),
        NestedField(6, "range_until", long_),
    ]
    iceberg_table(place, schema=Schema(*columns))
    write(records(FIRST), place, [FIRST])
    without = records(SECOND).set_column(3, "value", pa.array(["a", None]))
    with pytest.raises(IllegalStateError, match="'value' is NULL in a record, and required"):
        write(without, place, [SECOND])
    assert rows("iceberg", place) == expected((0, 2, "a"))


def test_table_that_pyiceberg_cannot_write_is_refused(tmp_path: Path) -> None:
    place, write = str(tmp_path / "out"), WRITERS["iceberg"]
    table = iceberg_table(place, schema=SCHEMA)
    with table.update_spec() as spec:
        spec.add_field("value", BucketTransform(4))
    with pytest.raises(ConfigurationError, match="pyiceberg cannot write to the table"):
        write(records(FIRST), place, [FIRST])


@pytest.mark.parametrize("kind", KINDS)
def test_time_that_pythons_datetime_does_not_have_is_written(kind: str, tmp_path: Path) -> None:
    """A producer may write microseconds into a timestamp that has milliseconds."""
    place, write = place_in(kind, tmp_path), WRITERS[kind]
    late = pa.array([1_700_000_000_000_000_000, 1], pa.timestamp("us", "UTC"))
    both = pa.StructArray.from_arrays([late, pa.array([5_000_000, 1], pa.date32())], ["t", "d"])
    for _ in range(2):
        write(with_column(FIRST, both).append_column("at", late), place, [FIRST])
    write(with_column(span(0, 1), both[1:]).append_column("at", late[1:]), place, [span(0, 1)])
    if kind == "parquet":
        return
    found = READERS[kind](place).sort_by("offset")
    assert found["at"].cast(pa.int64()).to_pylist() == [1, 1]
    assert rows(kind, place) == expected((0, 2, "a"))
    if kind == "iceberg":
        assert not catalog_in(place).load_table("shop.orders").properties
