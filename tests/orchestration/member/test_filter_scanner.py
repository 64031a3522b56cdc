"""A filter scan reads each range up to its first hit, and never blocks the member loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Message

from dagster_rebalance.core.batches.record_filter import RecordPredicate
from dagster_rebalance.core.model.commands import ScanRanges
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.orchestration.member.filter_scanner import FilterScanner
from tests.orchestration.parts import span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange

HITS = RecordPredicate(key_prefix="hit")


class FakeReader:
    """A log of records without a key, except for the hits; counts the records that were read."""

    def __init__(self, *hits: tuple[int, int], fails_at: int = 1 << 60) -> None:
        self.hits, self.fails_at = hits, fails_at
        self.read = 0
        self.now = 0.0
        self.is_closed = False

    def read_lists(
        self, ranges: Sequence[OffsetRange], _timeout_s: float
    ) -> Iterator[list[Message]]:
        for range_ in ranges:
            for offset in range(range_.start, range_.until):
                if offset >= self.fails_at:
                    msg = "gone"
                    raise BrokerError(msg)
                self.read += 1
                self.now += 0.001
                key = b"hit" if (range_.partition, offset) in self.hits else None
                yield [Message(range_.topic, partition=range_.partition, offset=offset, key=key)]

    def close(self) -> None:
        self.is_closed = True


def now(_name: str, work: Callable[[], None]) -> None:
    work()


def scanned(reader: FakeReader, *ranges: OffsetRange) -> list[tuple[OffsetRange, bool]]:
    wakes: list[int] = []
    scanner = FilterScanner(HITS, reader, lambda: reader.now)  # type: ignore[arg-type]
    scanner.begin(ScanRanges(7, ranges), now, lambda: wakes.append(1))
    answers = list(scanner.answers())
    assert {answer.number for answer in answers} == {7}
    assert len(wakes) == len(answers)
    return [result for answer in answers for result in answer.results]


def test_scan_reports_each_range_with_its_result() -> None:
    reader = FakeReader((0, 4), (2, 2_000))
    wanted = [span(0, 0, 10), span(1, 5, 20), span(2, 0, 9_000)]
    assert sorted(scanned(reader, *wanted)) == [
        (span(0, 0, 10), True),
        (span(1, 5, 20), False),
        (span(2, 0, 9_000), True),
    ]
    assert reader.read <= 10 + 15 + 500 + 2_000


@pytest.mark.parametrize("at", [0, 499, 500, 12_000])
def test_scan_reads_little_beyond_its_first_hit(at: int) -> None:
    reader = FakeReader((0, at))
    assert scanned(reader, span(0, 0, 100_000)) == [(span(0, 0, 100_000), True)]
    assert reader.read == at + 1


def test_range_that_cannot_be_read_counts_as_one_with_a_hit() -> None:
    reader = FakeReader(fails_at=600)
    assert scanned(reader, span(0, 0, 100), span(1, 0, 1_000)) == [
        (span(0, 0, 100), False),
        (span(1, 0, 1_000), True),
    ]


def test_slow_scan_reports_the_part_that_it_has_read() -> None:
    reader = FakeReader()
    ((range_, has_hit),) = scanned(reader, span(0, 0, 100_000))
    assert (range_.start, has_hit) == (0, False)
    assert 25_000 <= range_.until <= 35_000


def test_scan_without_progress_counts_as_one_with_a_hit() -> None:
    reader = FakeReader()
    reader.now = 0.0
    reader.read_lists = lambda *_: slow(reader)  # type: ignore[method-assign]
    assert scanned(reader, span(0, 0, 10)) == [(span(0, 0, 10), True)]


def slow(reader: FakeReader) -> Iterator[list[Message]]:
    reader.now += 100
    yield []


def test_closed_scanner_ends_its_scan_without_an_answer() -> None:
    reader = FakeReader()
    scanner = FilterScanner(HITS, reader)  # type: ignore[arg-type]
    scanner.close()
    scanner.begin(ScanRanges(1, (span(0, 0, 10),)), now, lambda: None)
    assert not list(scanner.answers())
    assert (reader.is_closed, reader.read) == (True, 0)
