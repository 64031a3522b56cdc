"""Each output from Arrow by its kind: how it is written, read and prepared."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pyarrow.dataset
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog

from dagster_rebalance.arrow.output import (
    write_delta,
    write_iceberg,
    write_parquet_by_range,
    write_postgres,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyiceberg.catalog import Catalog

    from dagster_rebalance import OffsetRange
    from dagster_rebalance.testing.postgres import Postgres


# A writer that waits for records keeps a thread of delta-rs, which has one for each core.
os.environ.setdefault("TOKIO_WORKER_THREADS", "8")


POSTGRES_TABLE = (
    'CREATE SCHEMA shop; CREATE TABLE shop.orders (topic text, partition int, "offset" bigint, '
    "value text, range_start bigint, range_until bigint); "
    'CREATE INDEX ON shop.orders (topic, partition, "offset")'
)


def _write_parquet(records: Any, place: str, _ranges: Sequence[OffsetRange]) -> None:  # noqa: ANN401
    write_parquet_by_range(records, place)


def _read_parquet(place: str) -> Any:  # noqa: ANN401
    return pyarrow.dataset.dataset(Path(place), format="parquet").to_table()


def _read_delta(place: str) -> Any:  # noqa: ANN401
    return DeltaTable(place).to_pyarrow_table()


def catalog_in(place: str) -> Catalog:
    """Return a catalog in a file, with the namespace shop."""
    catalog = SqlCatalog("lake", uri=f"sqlite:///{place}.db", warehouse=f"file://{place}")
    if not catalog.namespace_exists("shop"):
        catalog.create_namespace("shop")
    return catalog


def _write_iceberg(
    records: Any,  # noqa: ANN401
    place: str,
    ranges: Sequence[OffsetRange],
    *,
    merge_schema: bool = False,
) -> None:
    catalog = catalog_in(place)
    write_iceberg(records, "shop.orders", ranges, catalog=catalog, merge_schema=merge_schema)


def _read_iceberg(place: str) -> Any:  # noqa: ANN401
    return catalog_in(place).load_table("shop.orders").scan().to_arrow()


def _write_postgres(records: Any, place: str, ranges: Sequence[OffsetRange]) -> None:  # noqa: ANN401
    write_postgres(records, "shop.orders", ranges, connection=place)


def _read_postgres(place: str) -> Any:  # noqa: ANN401
    with psycopg.connect(place) as database:
        found = database.execute('SELECT partition, "offset", value FROM shop.orders').fetchall()
    return pa.Table.from_pylist(
        [dict(zip(("partition", "offset", "value"), row, strict=True)) for row in found]
    )


def place_of(kind: str, folder: Path, postgres: Callable[[], Postgres]) -> str:
    """Return the place of an empty output."""
    if kind == "iceberg":
        catalog_in(str(folder / "out"))  # two writers cannot create it at the same time
    if kind != "postgres":
        return str(folder / "out")
    server, name = postgres(), f"shop_{uuid.uuid4().hex}"
    server.create_database(name)
    url = f"postgresql://dagster@127.0.0.1:{server.port}/{name}"
    with psycopg.connect(url) as database:
        database.execute(POSTGRES_TABLE)
    return url


WRITERS: Mapping[str, Callable[..., object]] = {
    "parquet": _write_parquet,
    "delta": write_delta,
    "iceberg": _write_iceberg,
    "postgres": _write_postgres,
}
READERS: Mapping[str, Callable[[str], Any]] = {
    "parquet": _read_parquet,
    "delta": _read_delta,
    "iceberg": _read_iceberg,
    "postgres": _read_postgres,
}
KINDS = [
    pytest.param(kind, marks=[pytest.mark.postgres] if kind == "postgres" else [])
    for kind in WRITERS
]
TABLES = [kind for kind in KINDS if kind.values != ("parquet",)]


def rows(kind: str, place: str) -> list[tuple[int, int, str]]:
    """Return partition, offset and value of each row, in order."""
    table = READERS[kind](place)
    return sorted(
        (row["partition"], row["offset"], row["value"])
        for row in table.select(["partition", "offset", "value"]).to_pylist()
    )
