"""Iteration on a real broker: between two records the group changes, or the caller does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.testing.deadline import wait_until
from tests.kafka.readers import CommitOnRevoke

if TYPE_CHECKING:
    from tests.kafka.readers import Reader, Readers

pytestmark = [
    pytest.mark.broker,
    pytest.mark.parametrize("group", ["consumer", "classic"], indirect=True),
]
EACH = 3000
PATIENCE_S = 0.01
"""The records must last until the group has changed: an iteration waits for the next one."""


def take(reader: Reader, count: int = 1) -> None:
    """Take records by iteration."""
    for _ in range(count):
        message = next(reader.consumer)
        reader.offsets[message.partition() or 0].append(message.offset() or 0)


def read_ahead(reader: Reader, *numbers: int) -> None:
    """Take records until some of these partitions are read ahead."""

    def is_ahead() -> bool:
        take(reader)
        return {record.partition() for record in reader.consumer.ahead.left}.issuperset(numbers)

    wait_until(is_ahead, timeout_s=120, what=f"records of {numbers}", interval_s=0)


def test_each_record_is_returned_once_through_a_rebalance(group: Readers) -> None:
    group.produce(EACH)
    blue = group.reader(CommitOnRevoke())
    take(blue, EACH)
    green = group.reader(CommitOnRevoke())

    def is_shared() -> bool:
        take(blue)
        green.poll(PATIENCE_S)
        return bool(green.consumer.assignment())

    wait_until(is_shared, timeout_s=120, what="the share of green", interval_s=0)
    assert blue.consumer.assignment().isdisjoint(green.consumer.assignment())
    group.play(lambda: blue.count + green.count == 4 * EACH, blue, green, what="the rest")
    for number in range(4):
        assert blue.offsets[number] + green.offsets[number] == list(range(EACH))


def test_delayed_partition_returns_nothing_that_was_read_ahead(group: Readers) -> None:
    group.produce(EACH)
    blue = group.reader()
    read_ahead(blue, 0)
    green = group.reader()

    def is_requested() -> bool:
        take(blue)
        green.poll(PATIENCE_S)
        return bool(blue.consumer.get_to_be_revoked_partitions())

    wait_until(is_requested, timeout_s=120, what="a revoke request", interval_s=0)
    held = blue.consumer.get_to_be_revoked_partitions()
    before = {tp: len(blue.offsets[tp.partition]) for tp in held}
    for _ in range(50):
        assert blue.consumer.delay_revoke(held)
        take(blue)
    blue.consumer.commit_sync()
    assert {tp: len(blue.offsets[tp.partition]) for tp in held} == before
    committed = blue.consumer.committed(held)
    assert {tp: at.offset if at else 0 for tp, at in committed.items()} == before
    group.play(lambda: blue.count + green.count == 4 * EACH, blue, green, what="the rest")
    for number in range(4):
        assert blue.offsets[number] + green.offsets[number] == list(range(EACH))


def test_pause_seek_and_break_lose_and_repeat_no_record(group: Readers) -> None:
    group.produce(EACH)
    blue = group.reader()
    take(blue, 1000)
    read_ahead(blue)
    number = blue.consumer.ahead.left[0].partition() or 0
    tp, before = blue.tp(number), list(blue.offsets[number])
    blue.consumer.pause([tp])
    assert blue.consumer.position(tp) == len(before)
    take(blue, 20)
    assert blue.offsets[number] == before
    blue.consumer.resume([tp])
    for count, message in enumerate(blue.consumer, 1):
        blue.offsets[message.partition() or 0].append(message.offset() or 0)
        if count == 500:
            break
    blue.consumer.seek(tp, len(blue.offsets[number]))
    take(blue, 500)
    blue.consumer.commit_sync()
    committed = blue.consumer.committed([blue.tp(each) for each in range(4)])
    for each in range(4):
        assert blue.offsets[each] == list(range(len(blue.offsets[each])))
        at = committed[blue.tp(each)]
        assert (at.offset if at else 0) == len(blue.offsets[each])
