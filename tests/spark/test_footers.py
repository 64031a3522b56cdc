"""Ranges of Parquet files by their footers, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from dagster_rebalance.outputs.layout import COLUMNS, RangeKey, local_folder
from dagster_rebalance.spark.parquet_files import ranges_by_file, stored_schemas

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST, SECOND = ("orders", 0, 0, 5), ("orders", 0, 5, 9)


def write(file: Path, rows: Sequence[Sequence[Any]], **options: Any) -> Path:  # noqa: ANN401
    columns: dict[str, Any] = {
        name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)
    }
    kinds = (pa.string(), pa.int32(), pa.int64(), pa.int64())
    schema = pa.schema(list(zip(COLUMNS, kinds, strict=True)))
    parquet.write_table(pa.table(columns, schema=schema), file, **options)
    return file


def test_encrypted_file_has_no_known_schema(tmp_path: Path) -> None:
    folder = tmp_path / "topic_partition=orders-p0"
    folder.mkdir()
    file = folder / "0-5.parquet"
    file.write_bytes(b"PARE" + bytes(20) + b"PARE")
    assert list(stored_schemas(tmp_path)) == [(file, None)]


def test_each_file_of_one_range_is_found(tmp_path: Path) -> None:
    one = write(tmp_path / "1.parquet", [FIRST] * 5, row_group_size=2)
    two = write(tmp_path / "2.parquet", [SECOND])
    write(tmp_path / "3.parquet", [])
    write(tmp_path / "_4.parquet", [FIRST])
    (tmp_path / "_SUCCESS").touch()
    assert ranges_by_file(tmp_path, 6) == {one: RangeKey(*FIRST), two: RangeKey(*SECOND)}


def test_empty_file_has_no_range(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", [])
    assert ranges_by_file(tmp_path, 0) == {}


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([FIRST, SECOND], {}),
        ([FIRST, SECOND], {"row_group_size": 1}),
        ([FIRST, ("orders", 0, None, 5)], {}),
        ([(None, 0, 0, 5)], {}),
        ([("orders", 0, -5, 5)], {}),
        ([FIRST], {"write_statistics": False}),
    ],
)
def test_file_without_one_proven_range_is_rejected(
    tmp_path: Path, rows: list[tuple[Any, ...]], options: dict[str, Any]
) -> None:
    write(tmp_path / "1.parquet", rows, **options)
    assert ranges_by_file(tmp_path, len(rows)) is None


def test_range_in_two_files_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", [FIRST])
    write(tmp_path / "2.parquet", [FIRST])
    assert ranges_by_file(tmp_path, 2) is None


def test_missing_records_are_detected(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", [FIRST] * 4)
    assert ranges_by_file(tmp_path, 5) is None
    assert ranges_by_file(tmp_path / "none", 5) is None


def test_unreadable_file_is_rejected(tmp_path: Path) -> None:
    whole = write(tmp_path / "1.parquet", [FIRST] * 4).read_bytes()
    (tmp_path / "1.parquet").write_bytes(whole[:-10])
    assert ranges_by_file(tmp_path, 4) is None


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("/data/out", Path("/data/out")),
        ("file:///data/out", Path("/data/out")),
        ("file:/data/out", Path("/data/out")),
        ("out#1", Path.cwd() / "out#1"),
        ("/a b/c%20d", Path("/a b/c%20d")),
        ("file:///a b/c%20d#1", Path("/a b/c%20d#1")),
        ("s3a://bucket/out", None),
        ("file://host/out", None),
    ],
)
def test_only_a_mounted_path_is_a_local_folder(path: str, folder: Path | None) -> None:
    assert local_folder(path) == folder
