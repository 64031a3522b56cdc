"""A partition without progress is reported after a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.reading.partition_watch import (
    CHECK_EVERY_S,
    STALLED_AFTER_S,
    StalledPartitions,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

ORDERS, USERS = TopicPartition("orders", 0), TopicPartition("users", 0)


class Looks:
    """Looks at the positions, each `CHECK_EVERY_S` after the one before."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watch = StalledPartitions(self.now)

    def look(self, behind: Mapping[TopicPartition, int]) -> frozenset[TopicPartition]:
        self.now += CHECK_EVERY_S
        return self.watch.check(behind, self.now)

    def until(self, limit_s: float, behind: Mapping[TopicPartition, int]) -> None:
        until = self.now + limit_s
        while self.now + CHECK_EVERY_S < until:
            assert self.look(behind) == frozenset()


def test_partition_at_one_offset_is_stalled_after_the_limit() -> None:
    looks = Looks()
    looks.look({ORDERS: 7, USERS: 0})
    looks.until(STALLED_AFTER_S, {ORDERS: 7, USERS: 1})
    assert looks.look({ORDERS: 7, USERS: 2}) == {ORDERS}


def test_partition_at_the_end_in_between_counts_again() -> None:
    looks = Looks()
    looks.look({ORDERS: 7})
    looks.until(STALLED_AFTER_S, {ORDERS: 7})
    looks.look({})
    assert looks.look({ORDERS: 7}) == frozenset()


def test_reported_partition_is_stalled_again_after_the_limit() -> None:
    looks = Looks()
    looks.look({ORDERS: 7})
    looks.until(STALLED_AFTER_S, {ORDERS: 7})
    assert looks.look({ORDERS: 7}) == {ORDERS}
    looks.watch.restart([ORDERS, USERS])
    looks.look({ORDERS: 7})
    looks.until(STALLED_AFTER_S, {ORDERS: 7})
    assert looks.look({ORDERS: 7}) == {ORDERS}


def test_time_without_polls_does_not_count() -> None:
    looks = Looks()
    looks.look({ORDERS: 7})
    looks.now += 10 * STALLED_AFTER_S
    assert looks.look({ORDERS: 7}) == frozenset()


def test_check_is_due_at_intervals() -> None:
    watch = StalledPartitions(0.0)
    assert not watch.is_due(CHECK_EVERY_S - 1)
    assert watch.is_due(CHECK_EVERY_S)
    watch.check({}, CHECK_EVERY_S)
    assert not watch.is_due(2 * CHECK_EVERY_S - 1)
