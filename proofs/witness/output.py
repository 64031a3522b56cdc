"""Compare the output with the produced records: each number exactly once, in its place."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pyarrow.dataset
from pyspark.sql.connect.session import SparkSession

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path


class Row(NamedTuple):
    """A record of the output."""

    number: int
    partition: int
    offset: int
    range_start: int
    range_until: int


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a comparison.

    Attributes:
        records: Number of output rows.
        lost: Produced numbers that are missing.
        doubled: Numbers that occur more than once.
        wrong: Rows with a number, partition or offset that was not produced, or in the folder of
            another range.
    """

    records: int
    lost: tuple[int, ...]
    doubled: tuple[int, ...]
    wrong: tuple[Row, ...]


def compare_output(produced: Mapping[int, tuple[int, int | None]], rows: Iterable[Row]) -> Output:
    """Compare the output with the partition and offset of each produced number.

    A number with unknown offset matches any other free offset of its partition.
    """
    counts: Counter[int] = Counter()
    taken = set(produced.values())
    wrong = []
    for row in rows:
        counts[row.number] += 1
        place, found = produced.get(row.number), (row.partition, row.offset)
        is_there = place == found or (place == (row.partition, None) and found not in taken)
        if not is_there or not row.range_start <= row.offset < row.range_until:
            wrong.append(row)
    return Output(
        records=sum(counts.values()),
        lost=tuple(sorted(produced.keys() - counts.keys())),
        doubled=tuple(sorted(number for number, count in counts.items() if count > 1)),
        wrong=tuple(wrong),
    )


def parquet_rows(folder: Path) -> Iterator[Row]:
    """Read an output that Spark has written by range."""
    found = pyarrow.dataset.dataset(folder, format="parquet", partitioning="hive").to_table(
        columns=list(Row._fields)
    )
    for row in found.to_pylist():
        yield Row(**row)


def table_rows(remote: str, table: str) -> Iterator[Row]:
    """Read a table through a Spark Connect server that supports its format."""
    session = SparkSession.builder.remote(remote).create()
    try:
        for row in session.table(table).select(*Row._fields).collect():
            yield Row(*row)
    finally:
        session.stop()


def json_rows(folder: Path) -> Iterator[Row]:
    """Read an output of JSON lines, with a file `<start>-<until>.jsonl` per range."""
    for file in folder.glob("*/*.jsonl"):
        start, until = map(int, file.stem.split("-"))
        for line in file.read_text().splitlines():
            row = json.loads(line)
            yield Row(row["number"], row["partition"], row["offset"], start, until)
