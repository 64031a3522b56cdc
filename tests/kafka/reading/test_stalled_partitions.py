"""A partition without progress is found after a time, and one that goes on never is."""

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
        """One look."""
        self.now += CHECK_EVERY_S
        return self.watch.check(behind, self.now)

    def until(self, limit_s: float, behind: Mapping[TopicPartition, int]) -> None:
        """Looks that find nothing."""
        until = self.now + limit_s
        while self.now + CHECK_EVERY_S < until:
            assert self.look(behind) == frozenset()


def test_a_partition_that_stays_at_one_offset_is_found_after_the_limit() -> None:
    """Another partition that goes on is not."""
    looks = Looks()
    looks.look({ORDERS: 7, USERS: 0})
    looks.until(STALLED_AFTER_S, {ORDERS: 7, USERS: 1})
    assert looks.look({ORDERS: 7, USERS: 2}) == {ORDERS}


def test_a_partition_that_reached_the_end_in_between_counts_from_its_next_record() -> None:
    """It was not behind all the time."""
    looks = Looks()
    looks.look({ORDERS: 7})
    looks.until(STALLED_AFTER_S, {ORDERS: 7})
    looks.look({})
    assert looks.look({ORDERS: 7}) == frozenset()


def test_a_reported_partition_is_found_again_after_the_limit() -> None:
    """Each poll would repeat the report otherwise."""
    looks = Looks()
    looks.look({ORDERS: 7})
    looks.until(STALLED_AFTER_S, {ORDERS: 7})
    assert looks.look({ORDERS: 7}) == {ORDERS}
    looks.watch.restart([ORDERS, USERS])
    looks.look({ORDERS: 7})
    looks.until(STALLED_AFTER_S, {ORDERS: 7})
    assert looks.look({ORDERS: 7}) == {ORDERS}


def test_the_time_in_which_nobody_polls_does_not_count() -> None:
    """What the client has read ahead waits for the caller."""
    looks = Looks()
    looks.look({ORDERS: 7})
    looks.now += 10 * STALLED_AFTER_S
    assert looks.look({ORDERS: 7}) == frozenset()


def test_positions_are_looked_at_from_time_to_time_only() -> None:
    """A look at 1,000 partitions costs more than a poll."""
    watch = StalledPartitions(0.0)
    assert not watch.is_due(CHECK_EVERY_S - 1)
    assert watch.is_due(CHECK_EVERY_S)
    watch.check({}, CHECK_EVERY_S)
    assert not watch.is_due(2 * CHECK_EVERY_S - 1)
