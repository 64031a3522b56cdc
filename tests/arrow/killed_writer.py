"""A process that writes half of its records to an output and then waits for more: to be killed.

Arguments: the kind of the output (`tests.arrow.sinks`) and its place.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_rebalance.arrow import parquet
from dagster_rebalance.arrow.range_records import RangeRecords
from tests.arrow.given import SCHEMA, records, span
from tests.arrow.sinks import WRITERS

if TYPE_CHECKING:
    from collections.abc import Iterator


def halved(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the first batch, and never end."""
    yield next(batches)
    print("half is read", flush=True)  # noqa: T201 - the test reads it
    threading.Event().wait()


kind, place = sys.argv[1:]
batches = records(span(0, 100), "b").to_batches(max_chunksize=50)
given: Any = pa.RecordBatchReader.from_batches(SCHEMA, batches)
if kind == "parquet":
    parquet.BUFFER_BYTES = 1
    given = pa.RecordBatchReader.from_batches(SCHEMA, halved(iter(batches)))
else:
    reader = RangeRecords.reader

    def reader_of_half(self: RangeRecords, schema: Any = None) -> Any:  # noqa: ANN401
        whole = reader(self, schema)
        return pa.RecordBatchReader.from_batches(whole.schema, halved(whole))

    RangeRecords.reader = reader_of_half  # type: ignore[method-assign]
WRITERS[kind](given, place, [span(0, 100)])
