"""Records as Arrow tables with the columns of Spark's Kafka source; pyarrow is optional.

Values are converted by column. The messages are dropped after each list that Kafka's client has
returned: only their values are kept for a record batch.
"""

from __future__ import annotations

from importlib import import_module
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from confluent_kafka import Message

    from dagster_rebalance.core.model.offsets import OffsetRange

_RECORDS_PER_BATCH = 10_000
MAX_CHUNK_BYTES = 64 << 20
"""The size of the values of a record batch, or of a chunk of messages, after which it is full."""
_MAX_MS = (1 << 63) // 1000 - 1
"""The limit of a column of microseconds. A producer that writes nanoseconds exceeds it."""


def pyarrow() -> Any:  # noqa: ANN401 - it has no types
    """Return the module pyarrow."""
    try:
        return import_module("pyarrow")
    except ImportError as problem:
        msg = f"kafka_batch.arrow needs pyarrow: install it with `pip install pyarrow` ({problem})"
        raise ConfigurationError(msg) from problem


def record_schema() -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return the columns of records that are not decoded."""
    pa = pyarrow()
    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    return pa.schema(
        [
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("timestamp", pa.timestamp("us", "UTC")),
            ("timestampType", pa.int32()),
            ("headers", pa.list_(header)),
            ("range_start", pa.int64()),
            ("range_until", pa.int64()),
        ]
    )


def record_batches(
    read: Iterable[Sequence[Message]], ranges: Sequence[OffsetRange]
) -> Iterator[Any]:
    """Yield messages of some ranges, which were read in lists, as record batches."""
    schema = record_schema()
    rows = _Rows(ranges)
    for messages in read:
        rows.add(messages)
        if rows.are_full:
            yield rows.as_batch(schema)
            rows = _Rows(ranges)
    if rows.count:
        yield rows.as_batch(schema)


class _Rows:
    """The values of the rows of one record batch."""

    def __init__(self, ranges: Sequence[OffsetRange]) -> None:
        self._ranges = ranges
        self._by_partition: dict[tuple[str | None, int | None], list[int]] = {}
        for index, range_ in enumerate(ranges):
            self._by_partition.setdefault((range_.topic, range_.partition), []).append(index)
        # Usually the number of the partition identifies the range.
        by_number: dict[int | None, int] = {
            range_.partition: index for index, range_ in enumerate(ranges)
        }
        self._by_number = by_number if len(by_number) == len(ranges) else {}
        self._bytes = 0
        self._values: dict[str, list[Any]] = {"key": [], "value": [], "offset": []}
        # The index of each row's range, from which four columns are taken.
        self._indices: list[int] = []
        # The type and the milliseconds of each row, alternately.
        self._timestamps: list[int] = []
        self._headers: list[Any] = []

    @property
    def count(self) -> int:
        return len(self._indices)

    @property
    def are_full(self) -> bool:
        return self.count >= _RECORDS_PER_BATCH or self._bytes >= MAX_CHUNK_BYTES

    def add(self, messages: Sequence[Message]) -> None:
        """Keep the values of messages, which are of one class."""
        if not messages:
            return
        kind = type(messages[0])
        self._values["key"] += map(kind.key, messages)
        self._values["value"] += map(kind.value, messages)
        self._values["offset"] += map(kind.offset, messages)
        self._indices += self._indices_of(messages)
        self._timestamps += chain.from_iterable(map(kind.timestamp, messages))
        self._headers += map(kind.headers, messages)
        self._bytes += sum(map(len, messages))

    def as_batch(self, schema: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
        """Return all rows as a record batch."""
        pa = pyarrow()
        arrays = {
            name: pa.array(values, schema.field(name).type) for name, values in self._values.items()
        }
        indices = pa.array(self._indices, pa.int32())
        for name, of_range in (
            ("topic", "topic"),
            ("partition", "partition"),
            ("range_start", "start"),
            ("range_until", "until"),
        ):
            values = [getattr(range_, of_range) for range_ in self._ranges]
            arrays[name] = pa.array(values, schema.field(name).type).take(indices)
        arrays["timestamp"], arrays["timestampType"] = _timestamps(self._timestamps)
        arrays["headers"] = _headers(self._headers, schema.field("headers").type)
        return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)

    def _indices_of(self, messages: Sequence[Message]) -> Iterable[int]:
        kind = type(messages[0])
        numbers = map(kind.partition, messages)
        if self._by_number:
            return map(self._by_number.__getitem__, numbers)
        partitions = zip(map(kind.topic, messages), numbers, strict=True)
        return [
            next(
                index
                for index in self._by_partition[partition]
                if self._ranges[index].start <= (offset or 0) < self._ranges[index].until
            )
            for partition, offset in zip(partitions, map(kind.offset, messages), strict=True)
        ]


def _timestamps(flat: Sequence[int]) -> tuple[Any, Any]:
    """Return the times and their types; Kafka's client numbers the types from 1, Spark from 0."""
    pa = pyarrow()
    compute = import_module("pyarrow.compute")
    kinds, at_ms = pa.array(flat[::2], pa.int32()), pa.array(flat[1::2], pa.int64())
    is_known = compute.and_(
        compute.not_equal(kinds, 0),
        compute.and_(compute.greater_equal(at_ms, -_MAX_MS), compute.less_equal(at_ms, _MAX_MS)),
    )
    known = compute.if_else(is_known, at_ms, pa.scalar(None, pa.int64()))
    times = known.cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))
    return times, compute.subtract(kinds, pa.scalar(1, pa.int32()))


def _headers(lists: Sequence[Any], kind: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return the headers of each row; None for a row without headers."""
    pa = pyarrow()
    if not any(lists):  # the usual case
        return pa.array(lists, kind)
    ends = accumulate((len(one or ()) for one in lists), initial=0)
    starts = [None if one is None else end for one, end in zip(lists, ends, strict=False)]
    pairs = list(chain.from_iterable(one or () for one in lists))
    flat = pa.StructArray.from_arrays(
        [
            pa.array([name for name, _ in pairs], pa.string()),
            pa.array([value for _, value in pairs], pa.binary()),
        ],
        fields=list(kind.value_type),
    )
    return pa.ListArray.from_arrays(pa.array([*starts, len(pairs)], pa.int32()), flat)
