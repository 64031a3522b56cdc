"""The search of the record of an offset reads few records, and finds the newest one."""

from __future__ import annotations

import random
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.reporting.record_search import (
    OLDEST,
    Place,
    StoredRecord,
    search,
)


class Records:
    """The records of a partition, as Dagster stores them, and how many were read."""

    def __init__(self, records: list[StoredRecord]) -> None:
        self.records = records
        self.reads = 0

    def below(self, storage_id: int | None) -> StoredRecord | None:
        self.reads += 1
        if storage_id is None or storage_id == OLDEST:
            end = -1 if storage_id is None else 0
            return self.records[end] if self.records else None
        at = bisect_left(self.records, storage_id, key=lambda one: one.storage_id)
        return self.records[at - 1] if at else None

    def find(self, offset: int) -> Place:
        self.reads = 0
        searching = search(offset)
        try:
            asked = next(searching)
            while True:
                asked = searching.send(self.below(asked))
        except StopIteration as done:
            place: Place = done.value
            return place

    def newest_of(self, offset: int) -> StoredRecord | None:
        covering = (one for one in reversed(self.records) if one.start <= offset < one.until)
        return next(covering, None)


def stored(bounds: list[tuple[int, int]], ids: list[int] | None = None) -> Records:
    ids = ids or [3 * number + 1 for number in range(len(bounds))]
    return Records(
        [StoredRecord(at, start, until) for at, (start, until) in zip(ids, bounds, strict=True)]
    )


@st.composite
def histories(draw: st.DrawFn) -> Records:
    """Contiguous records with skipped offsets in between, and uneven storage ids."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50)), max_size=60))
    at, storage_id = draw(st.integers(0, 1000)), 0
    bounds, ids = [], []
    for skipped, length in lengths:
        bounds.append((at + skipped, at + skipped + length))
        at += skipped + length
        storage_id += draw(st.sampled_from([1, 1, 2, 500]))
        ids.append(storage_id)
    return stored(bounds, ids)


@given(histories(), st.integers(0, 5_000))
def test_search_finds_the_record_of_an_offset(records: Records, offset: int) -> None:
    place = records.find(offset)
    assert place.covering == records.newest_of(offset)
    before = [one for one in records.records if one.start <= offset]
    after = [one for one in records.records if one.start > offset]
    assert place.before == (before[-1] if before else None)
    assert place.after == (after[0] if after else None)


def test_search_reads_few_of_many_records() -> None:
    random.seed(1)
    at, bounds, ids, storage_id = 0, [], [], 0
    for _ in range(200_000):
        length = random.randint(1, 10_000)  # noqa: S311 - no secret
        bounds.append((at, at + length))
        at += length
        storage_id += random.randint(1, 20)  # noqa: S311 - as above
        ids.append(storage_id)
    records = stored(bounds, ids)
    assert at > 10**9 - 10**8
    for offset in (0, 1, at // 3, at // 2, at - 1, at, *random.sample(range(at), 50)):
        assert records.find(offset).covering == records.newest_of(offset)
        assert records.reads < 60


@pytest.mark.parametrize("offset", [0, 299, 300, 450, 599, 600, 999])
def test_search_finds_the_newest_record_after_a_move_back(offset: int) -> None:
    first = [(start, start + 10) for start in range(0, 1000, 10)]
    again = [(start, start + 10) for start in range(300, 2000, 10)]
    records = stored([*first, *again])
    assert records.find(offset).covering == records.newest_of(offset)


@pytest.mark.parametrize("offset", [5, 150, 205, 250, 299, 301])
def test_search_finds_the_newest_record_after_several_moves_back(offset: int) -> None:
    eras = [(0, 400), (100, 600), (200, 700), (300, 900)]
    records = stored([(at, at + 10) for begin, end in eras for at in range(begin, end, 10)])
    assert records.find(offset).covering == records.newest_of(offset)


def test_record_of_a_suspended_member_is_found_among_later_ones() -> None:
    records = stored([(0, 10), (20, 30), (10, 20), (30, 40), (40, 50)])
    assert records.find(25).covering == records.newest_of(25)


def test_search_without_records_finds_nothing() -> None:
    assert stored([]).find(5) == Place()


def test_offset_before_the_first_record_has_the_next_record() -> None:
    records = stored([(10, 20), (20, 30)])
    assert records.find(5) == Place(after=records.records[0])


def test_offset_after_the_last_record_has_the_record_before() -> None:
    records = stored([(10, 20), (20, 30)])
    assert records.find(30) == Place(before=records.records[1])


def test_search_ends_if_the_records_are_wiped_in_between() -> None:
    records = stored([(start, start + 10) for start in range(0, 1000, 10)])

    class Wiped(Records):
        def below(self, storage_id: int | None) -> StoredRecord | None:
            return None if storage_id is not None else super().below(storage_id)

    assert Wiped(records.records).find(5) == Place(after=records.records[-1])
