"""Records and ranges for the outputs from Arrow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_rebalance import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("value", pa.string()),
        ("range_start", pa.int64()),
        ("range_until", pa.int64()),
    ]
)


def span(start: int, until: int, partition: int = 0, topic: str = "orders") -> OffsetRange:
    return OffsetRange(topic, partition, start, until)


def records(ranges: OffsetRange | Sequence[OffsetRange], value: str = "a") -> Any:  # noqa: ANN401
    """Return all records of ranges, each with a value, as a table."""
    wanted = [ranges] if isinstance(ranges, OffsetRange) else ranges
    rows = [
        {
            "topic": range_.topic,
            "partition": range_.partition,
            "offset": offset,
            "value": value,
            "range_start": range_.start,
            "range_until": range_.until,
        }
        for range_ in wanted
        for offset in range(range_.start, range_.until)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def with_time(table: Any) -> Any:  # noqa: ANN401
    """Add a time to each record: its offset, in seconds."""
    seconds = table["offset"].cast(pa.timestamp("s", "UTC"))
    return table.append_column("at", seconds.cast(pa.timestamp("us", "UTC")))


def failing(table: Any, error: Exception) -> Any:  # noqa: ANN401
    """Return a reader of a table that fails after its records."""

    def batches() -> Iterator[Any]:
        yield from table.to_batches()
        raise error

    return pa.RecordBatchReader.from_batches(table.schema, batches())


def expected(*spans: tuple[int, int, str], partition: int = 0) -> list[tuple[int, int, str]]:
    return [
        (partition, offset, value)
        for start, until, value in spans
        for offset in range(start, until)
    ]
