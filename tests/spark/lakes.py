"""Sessions that can write tables of Delta Lake and Iceberg, and their tables."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.connect.session import SparkSession as ConnectSession

from dagster_rebalance.spark.delta_and_iceberg import write_delta, write_iceberg
from dagster_rebalance.testing.spark_connect import (
    DELTA_LAKE,
    ICEBERG,
    SparkConnectServer,
    table_settings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from dagster_rebalance import OffsetRange

FORMATS = ("delta", "iceberg")

# A dropped session shuts down the threads that all sessions share. If the collector drops it while
# another session uses them, that one fails, or waits forever for a lock that its own thread holds
# (pyspark 4.0, reattach.py). `stop` closes the sessions of tests.
with suppress(AttributeError):
    del ConnectSession.__del__


@contextmanager
def table_server(warehouse: Path) -> Iterator[SparkConnectServer]:
    """A Spark Connect server for both formats."""
    libraries, settings = (DELTA_LAKE, ICEBERG), table_settings(warehouse)
    with SparkConnectServer(libraries=libraries, settings=settings) as server:
        yield server


@contextmanager
def connected(server: SparkConnectServer) -> Iterator[SparkSession]:
    session = ConnectSession.builder.remote(server.remote).create()
    yield session  # type: ignore[misc]  # the two kinds share a parent in pyspark's code, but not in its types
    session.stop()


@dataclass(frozen=True)
class Table:
    """A table of one of the formats.

    Attributes:
        format: delta or iceberg.
        folder: Where its files are.
        name: As users write it.
    """

    format: str
    folder: Path
    name: str

    @classmethod
    def of(cls, format_: str, warehouse: Path, folder: Path) -> Table:
        """Return a table that does not exist yet, in a separate folder."""
        if format_ == "delta":
            return cls(format_, folder / "orders", str(folder / "orders"))
        name = folder.name.replace("-", "_")
        return cls(format_, warehouse / "shop" / name, f"lake.shop.{name}")

    @property
    def sql_name(self) -> str:
        name = self.name.replace("`", "``")
        return f"delta.`{name}`" if self.format == "delta" else self.name

    def write(
        self,
        frame: DataFrame,
        ranges: Sequence[OffsetRange],
        *,
        as_read: bool = False,
        **options: str,
    ) -> None:
        """Replace ranges; with `as_read`, Iceberg moves no rows between tasks."""
        if self.format == "delta":
            write_delta(frame, self.name, ranges, options=options)
        else:
            if as_read:
                options["distribution-mode"] = "none"
            write_iceberg(frame, self.name, ranges, options=options)

    def read(self, session: SparkSession, column: str = "value") -> list[tuple[int, int, str]]:
        """Return partition, offset and a text column of each row, in order."""
        if self.format == "iceberg":  # its catalogs cache tables for a while
            session.catalog.refreshTable(self.sql_name)
        rows = session.table(self.sql_name).selectExpr("partition", "offset", column)
        return sorted(tuple(row) for row in rows.collect())

    def data_files(self) -> set[Path]:
        """Return the data files in its folder, with and without a commit."""
        return {path for path in self.folder.rglob("*.parquet") if "_delta_log" not in path.parts}

    def compact(self, session: SparkSession) -> None:
        if self.format == "delta":
            session.sql(f"OPTIMIZE {self.sql_name}").collect()
        else:
            session.sql(
                f'CALL lake.system.rewrite_data_files(table => "{self.name}", '
                "options => map('min-input-files', '2'))"
            ).collect()
