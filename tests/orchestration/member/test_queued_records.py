"""Records wait for the storage thread, and can be cancelled until it stores them."""

from __future__ import annotations

from dataclasses import replace

from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.orchestration.member.queued_records import QueuedRecords
from tests.core.world import span


def record(number: int) -> RecordCommit:
    return RecordCommit(span(number, 0, 9), 1, "b", "r", 0, None, None)


def test_queued_records_are_taken_in_parts_and_in_order() -> None:
    queue = QueuedRecords()
    queue.add(map(record, range(150)))
    taken = queue.take()
    assert [commit.range.partition for commit in taken.commits] == list(range(100))
    assert [commit.range.partition for commit in queue.take().commits] == list(range(100, 150))
    assert not queue
    assert queue.take().commits == ()


def test_queued_record_that_is_cancelled_is_not_taken() -> None:
    queue = QueuedRecords()
    queue.add(map(record, range(3)))
    queue.cancel([record(1), record(7)])
    assert [commit.range.partition for commit in queue.take().commits] == [0, 2]
    queue.add([record(1)])
    queue.clear()
    assert not queue


def test_records_of_one_partition_are_taken_together_and_in_order() -> None:
    """A later record without the earlier one would hide that the earlier one is missing."""
    first, second = record(99), replace(record(99), range=span(99, 9, 12))
    queue = QueuedRecords()
    queue.add([*map(record, range(99)), first, second, record(100)])
    assert queue.take().commits[-2:] == (first, second)
    queue.clear()
    queue.add([second, record(7)])
    queue.add([first, second])
    assert queue.take().commits == (record(7), first, second)


def test_taken_record_is_wanted_until_it_is_cancelled() -> None:
    queue = QueuedRecords()
    queue.add(map(record, range(3)))
    taken = queue.take()
    queue.cancel([record(1)])
    assert [taken.is_wanted(record(number)) for number in range(4)] == [True, False, True, False]
    queue.clear()
    assert not taken.is_wanted(record(0))


def test_records_of_a_thread_that_hangs_are_not_wanted_after_the_next_take() -> None:
    queue = QueuedRecords()
    queue.add(map(record, range(3)))
    hanging = queue.take()
    queue.add(map(record, range(3)))
    taken = queue.take()
    assert not any(map(hanging.is_wanted, hanging.commits))
    assert all(map(taken.is_wanted, taken.commits))
