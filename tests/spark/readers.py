"""The readers that an output supports, called as users call them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import polars as pl
import pyarrow.dataset
import pyarrow.parquet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

Record = tuple[str, int]
Reader = Callable[[Path], list[Record]]


def by_duckdb(folder: Path) -> list[Record]:
    return duckdb.connect().sql(f"SELECT topic, \"offset\" FROM '{folder}/**/*.parquet'").fetchall()  # noqa: S608


def by_polars(folder: Path) -> list[Record]:
    return pl.scan_parquet(folder).select("topic", "offset").collect().rows()


def by_polars_glob(folder: Path) -> list[Record]:
    return pl.scan_parquet(f"{folder}/**/*.parquet").select("topic", "offset").collect().rows()


def by_pyarrow(folder: Path) -> list[Record]:
    table = pyarrow.dataset.dataset(folder, format="parquet", partitioning="hive").to_table()
    return [(row["topic"], row["offset"]) for row in table.to_pylist()]


def by_parquet_table(folder: Path) -> list[Record]:
    return [(row["topic"], row["offset"]) for row in pyarrow.parquet.read_table(folder).to_pylist()]


def by_spark(session: SparkSession, folder: Path) -> list[Record]:
    rows = session.read.parquet(str(folder)).select("topic", "offset").collect()
    return [(row["topic"], row["offset"]) for row in rows]


LIBRARIES: Mapping[str, Reader] = {
    "duckdb": by_duckdb,
    "polars": by_polars,
    "polars glob": by_polars_glob,
    "pyarrow": by_pyarrow,
    "read_table": by_parquet_table,
}


def read_by_all(session: SparkSession, folder: Path) -> dict[str, list[Record]]:
    """Return the records that each reader finds, sorted."""
    found = {name: read(folder) for name, read in LIBRARIES.items()}
    return {
        name: sorted(rows) for name, rows in {**found, "spark": by_spark(session, folder)}.items()
    }
