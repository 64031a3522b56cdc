"""Outputs of chaos: of Spark, or of Arrow without Spark.

Every run imports this module, so it imports almost nothing.
"""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING, Any

from dagster_rebalance.arrow import output as arrow
from dagster_rebalance.spark import output as spark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame

    from dagster_rebalance.core.model.offsets import OffsetRange

COLUMNS = ("number", "partition", "offset", "range_start", "range_until")
_POSTGRES_TABLE = "numbers"
CREATE = (
    f'CREATE TABLE {_POSTGRES_TABLE} (number bigint, topic text, partition int, "offset" bigint, '
    "range_start bigint, range_until bigint); "
    f'CREATE INDEX ON {_POSTGRES_TABLE} (topic, partition, "offset")'
)
"""Creates the table in Postgres."""


class Sink(enum.Enum):
    """The kinds of outputs."""

    PARQUET = "parquet"
    DELTA = "delta"
    ICEBERG = "iceberg"
    ARROW_PARQUET = "arrow-parquet"
    ARROW_DELTA = "arrow-delta"
    ARROW_ICEBERG = "arrow-iceberg"
    ARROW_POSTGRES = "arrow-postgres"

    @property
    def is_of_arrow(self) -> bool:
        return self.value.startswith("arrow-")

    @property
    def is_of_spark_alone(self) -> bool:
        return self in {Sink.DELTA, Sink.ICEBERG}

    def write(self, frame: DataFrame, output: Path, ranges: Sequence[OffsetRange]) -> None:
        """Replace ranges of the output in a folder, with Spark."""
        if self is Sink.DELTA:
            spark.write_delta(frame, str(output / "numbers"), ranges)
        elif self is Sink.ICEBERG:
            spark.write_iceberg(frame, self.table(output), ranges)
        else:
            spark.write_parquet_by_range(frame, str(output))

    def write_arrow(
        self, records: Any, output: Path, ranges: Sequence[OffsetRange], database: str
    ) -> None:
        """Replace ranges of the output in a folder or a database, without Spark."""
        if self is Sink.ARROW_DELTA:
            arrow.write_delta(records, str(output / "numbers"), ranges)
        elif self is Sink.ARROW_ICEBERG:
            arrow.write_iceberg(records, "chaos.numbers", ranges, catalog=catalog(output))
        elif self is Sink.ARROW_POSTGRES:
            arrow.write_postgres(records, _POSTGRES_TABLE, ranges, connection=database)
        else:
            arrow.write_parquet_by_range(records, str(output))

    def arrow_rows(self, output: Path, database: str) -> Iterator[tuple[int, ...]]:
        """Yield the rows of a table of Arrow."""
        if self is Sink.ARROW_POSTGRES:
            import psycopg  # noqa: PLC0415 - only for this sink

            with psycopg.connect(database) as connection:
                names = ", ".join(f'"{name}"' for name in COLUMNS)
                yield from connection.execute(
                    f"SELECT {names} FROM {_POSTGRES_TABLE}"  # noqa: S608 - own names
                ).fetchall()
            return
        if self is Sink.ARROW_DELTA:
            from deltalake import DeltaTable  # noqa: PLC0415 - only for this sink

            table = DeltaTable(output / "numbers").to_pyarrow_table()
        else:
            table = catalog(output).load_table("chaos.numbers").scan().to_arrow()
        yield from zip(*(table[name].to_pylist() for name in COLUMNS), strict=True)

    def table(self, output: Path) -> str:
        """Return the name of the output in SQL, if it is a table of Spark."""
        return "lake.chaos.numbers" if self is Sink.ICEBERG else f"delta.`{output / 'numbers'}`"


def catalog(output: Path) -> Any:
    """Return a catalog of Iceberg in a file."""
    from pyiceberg.catalog.sql import SqlCatalog  # noqa: PLC0415 - only for this sink

    found = SqlCatalog("lake", uri=f"sqlite:///{output}/lake.db", warehouse=f"file://{output}")
    found.create_namespace_if_not_exists("chaos")
    return found


def numbered(records: Any, good_rows: Callable[[Any], Any]) -> Any:
    """Return a reader of the good records, with the number in place of the value.

    Args:
        records: A reader.
        good_rows: Returns the good rows of a batch with the columns of the output.
    """
    import pyarrow as pa  # noqa: PLC0415 - only for the sinks of Arrow

    names = [name for name in COLUMNS if name != "number"]
    fields = [records.schema.field(name) for name in ("topic", *names)]
    schema = pa.schema([("number", pa.int64()), *((one.name, one.type) for one in fields)])

    def batches() -> Iterator[Any]:
        for batch in records:
            numbers = [json.loads(value)["number"] for value in batch["value"].to_pylist()]
            columns = [pa.array(numbers, pa.int64()), *(batch[one.name] for one in fields)]
            yield good_rows(pa.RecordBatch.from_arrays(columns, schema=schema))

    return pa.RecordBatchReader.from_batches(schema, batches())


def with_texts(rows: Any, name: str, texts: Sequence[str | None]) -> Any:
    """Return rows with one more column, of texts."""
    import pyarrow as pa  # noqa: PLC0415 - only for the sinks of Arrow

    return rows.append_column(name, pa.array(texts, pa.string()))
