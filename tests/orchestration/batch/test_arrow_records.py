"""Arrow tables by column have the rows of a conversion record by record."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.orchestration.batch import arrow_records
from dagster_rebalance.orchestration.batch.arrow_records import record_batches, record_schema
from dagster_rebalance.orchestration.batch.letters import as_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

FARTHEST_MS = (1 << 63) // 1000 - 1
ONE_EACH = tuple(OffsetRange(topic, number, 3, 9) for topic in ("a", "b") for number in range(3))
SEVERAL = (*ONE_EACH, OffsetRange("a", 0, 9, 12), OffsetRange("a", 0, 20, 22))
PAYLOADS: st.SearchStrategy[Any] = (
    st.none() | st.binary(max_size=5) | st.text(st.characters(exclude_categories=["Cs"]))
)
TIMES = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from(
    [0, 1_764_000_000_000, FARTHEST_MS, FARTHEST_MS + 1, -FARTHEST_MS, -FARTHEST_MS - 1]
)
HEADERS = st.none() | st.lists(
    st.tuples(st.text(st.characters(codec="utf-8")), PAYLOADS), max_size=3
)


@st.composite
def reads(draw: st.DrawFn) -> tuple[tuple[OffsetRange, ...], list[list[Message]]]:
    """Return ranges, and messages in them as a client returns them in lists."""
    ranges = draw(st.sampled_from([ONE_EACH, ONE_EACH[:3], SEVERAL]))

    def message() -> Message:
        range_ = draw(st.sampled_from(ranges))
        return Message(
            topic=range_.topic,
            partition=range_.partition,
            offset=draw(st.integers(range_.start, range_.until - 1)),
            key=draw(PAYLOADS),
            value=draw(PAYLOADS),
            timestamp=(draw(st.integers(0, 2)), draw(TIMES)),
            headers=draw(HEADERS),
        )

    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    return ranges, [[message() for _ in range(size)] for size in sizes]


def row(message: Message, ranges: Sequence[OffsetRange]) -> tuple[object, ...]:
    """Convert one record."""
    offset = message.offset() or 0
    at = (message.topic(), message.partition())
    range_ = next(
        one
        for one in ranges
        if (one.topic, one.partition) == at and one.start <= offset < one.until
    )
    kind, at_ms = message.timestamp()
    headers: Any = message.headers()
    return (
        *(as_bytes(message.key()), as_bytes(message.value()), *at, offset),
        at_ms * 1000 if kind and abs(at_ms) <= FARTHEST_MS else None,
        kind - 1,
        headers and [{"key": name, "value": as_bytes(value)} for name, value in headers],
        *(range_.start, range_.until),
    )


@given(reads())
def test_columns_have_the_values_of_each_record(
    read: tuple[tuple[OffsetRange, ...], list[list[Message]]],
) -> None:
    ranges, lists = read
    schema = record_schema()
    found = pa.Table.from_batches(record_batches(lists, ranges), schema)
    rows = [row(message, ranges) for message in chain.from_iterable(lists)]
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    expected = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    assert found.combine_chunks().equals(pa.Table.from_arrays(expected, schema=schema))
    found.validate(full=True)


def test_record_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_records, "_RECORDS_PER_BATCH", 3)
    monkeypatch.setattr(arrow_records, "MAX_CHUNK_BYTES", 10)

    def sizes(*lists: tuple[int, int]) -> list[int]:
        read = [
            [Message(topic="a", partition=0, offset=3, value=b"x" * size)] * count
            for count, size in lists
        ]
        return [batch.num_rows for batch in record_batches(read, ONE_EACH)]

    assert sizes((2, 1), (2, 1), (1, 1)) == [4, 1]
    assert sizes((1, 9), (1, 1), (1, 10), (0, 0)) == [2, 1]
    assert sizes() == []


def test_messages_are_dropped_after_each_list() -> None:
    """A record batch of large records would otherwise be in memory twice."""
    alive: set[int] = set()

    class Tracked(Message):
        def __init__(self, offset: int) -> None:
            super().__init__(topic="a", partition=0, offset=offset)
            alive.add(offset)

        def __del__(self) -> None:
            alive.discard(self.offset() or 0)

    def read() -> Any:  # noqa: ANN401 - lists of messages
        for offset in range(3, 6):
            yield [Tracked(offset)]
            assert len(alive) <= 1

    assert [batch.num_rows for batch in record_batches(read(), ONE_EACH)] == [3]
