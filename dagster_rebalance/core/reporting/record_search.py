"""Search of the record that covers an offset, among all records of a partition.

A partition may have a million records, so the search reads a few dozen records, one at a time. It
asks for the newest record below a storage id, and the caller sends that record.

Records are stored in the order of their offsets, except where an operator moved the offset back.
The newest record of an offset counts. The search detects a move back if two of the records that it
reads show it: `_SAMPLES` samples are spread over all records, and further samples become denser
towards the newest record. If a move back repeated fewer records than lie between two samples, an
earlier record of the same offset may be found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Generator

_SAMPLES = 8
_NEIGHBOURS = 4
"""How many older records are read if none covers the offset: a suspended member stores its records
late."""
_GALLOP = 8


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The offsets of a record, and its position among Dagster's events."""

    storage_id: int
    start: int
    until: int


@dataclass(frozen=True, slots=True)
class Place:
    """The position of an offset among the records.

    Attributes:
        covering: The record that covers the offset.
        before: The record that begins at the offset or before it.
        after: The next record.
    """

    covering: StoredRecord | None = None
    before: StoredRecord | None = None
    after: StoredRecord | None = None


OLDEST = 0
Search: TypeAlias = "Generator[int | None, StoredRecord | None, Place]"
"""Yields a storage id, or None for no bound, and receives the newest record below it. For `OLDEST`
it receives the oldest record."""
_Pair: TypeAlias = "Generator[int | None, StoredRecord | None, tuple[StoredRecord, StoredRecord]]"


def search(offset: int) -> Search:
    """Search the newest record that covers an offset."""
    read = yield from _read()
    if not read or read[-1].start <= offset:
        return (yield from _place(offset, read[-1] if read else None, None))
    newer = read.pop()
    while read:
        older = read[-1]
        if older.start > newer.start:  # moved back in between
            last, first = yield from _moved_back(older, newer)
            if first.start <= offset:
                return (yield from _crossing(offset, first, newer))
            newer = last
            continue
        if older.start <= offset:
            return (yield from _crossing(offset, older, newer))
        newer = read.pop()
    return Place(after=newer)


def _read() -> Generator[int | None, StoredRecord | None, list[StoredRecord]]:
    """Read the oldest and the newest record, and samples between them, oldest first."""
    newest = yield None
    if newest is None:
        return []
    read = {newest.storage_id: newest}
    oldest = yield OLDEST
    if oldest is not None:
        read[oldest.storage_id] = oldest
    first, last = min(read), newest.storage_id
    samples = {first + (last - first) * sample // _SAMPLES for sample in range(1, _SAMPLES)}
    step = 1
    while last - step > first:
        samples.add(last - step)
        step *= _GALLOP
    for at in sorted(samples, reverse=True):
        found = yield at + 1
        if found is not None:
            read[found.storage_id] = found
    return [read[storage_id] for storage_id in sorted(read)]


def _moved_back(older: StoredRecord, newer: StoredRecord) -> _Pair:
    """Return the last record before a move back, and the first record after it."""
    floor = older.storage_id
    while newer.storage_id - floor > 1:
        middle = (floor + newer.storage_id) // 2
        found = yield middle + 1
        if found is not None and found.storage_id > older.storage_id:
            if found.start > newer.start:
                older = found
            else:
                newer = found
                continue
        floor = middle
    return older, newer


def _crossing(offset: int, low: StoredRecord, high: StoredRecord) -> Search:
    """Search between a record that begins at or before the offset, and a record after it."""
    floor, turn = low.storage_id, 0
    while high.storage_id - floor > 1:
        # Offsets grow about evenly. The record before `high` ends the search once it is near.
        share = (offset - low.start) / (high.start - low.start) if turn % 3 == 0 else 0.5
        at = floor + int((high.storage_id - floor) * share)
        at = high.storage_id - 1 if turn % 3 == 1 else min(max(at, floor + 1), high.storage_id - 1)
        turn += 1
        found = yield at + 1
        if found is None or found.storage_id <= low.storage_id:
            floor = at
        elif found.start <= offset:
            low, floor = found, at
        else:
            high = found
    return (yield from _place(offset, low, high))


def _place(offset: int, before: StoredRecord | None, after: StoredRecord | None) -> Search:
    candidate = before
    for _ in range(_NEIGHBOURS):
        if candidate is None or candidate.start <= offset < candidate.until:
            break
        candidate = yield candidate.storage_id
    is_covering = candidate is not None and candidate.start <= offset < candidate.until
    return Place(candidate if is_covering else None, before, after)
