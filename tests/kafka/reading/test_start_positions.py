"""This package looks up where reading begins, and never the client.

Late answers of the client move partitions that have come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.reading.start_positions import StartPositions
from dagster_rebalance.testing.fake_group import FakeGroup, FakeMember

if TYPE_CHECKING:
    from collections.abc import Collection

P0, P1, P2, P3 = (TopicPartition("orders", number) for number in range(4))


class Deaf(FakeMember):
    """A member whose coordinator is unavailable."""

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float = 5.0
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        msg = f"no answer about {len(partitions)} within {timeout_s} s"
        raise BrokerError(msg, retriable=True)


class Headless(FakeGroup):
    """A cluster in which the first partition has no leader."""

    def end_offsets(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        if P0 in partitions:
            why = "it has no leader"
            raise BrokerError(why, retriable=True, partitions={P0: why})
        return super().end_offsets(partitions, timeout_s)


@pytest.fixture
def group() -> FakeGroup:
    group = FakeGroup({"orders": 4})
    group.committed[P0] = OffsetAndMetadata(3, "mine", 7)
    for tp in (P0, P1):
        group.produce(tp, 9)
    return group


@pytest.mark.parametrize(("reset", "where"), [("earliest", 0), ("latest", 9)])
def test_start_is_the_committed_offset_or_the_configured_end(
    group: FakeGroup, reset: str, where: int
) -> None:
    """The leader epoch of the commit shows a later truncation."""
    starts = StartPositions(group.member(), group, "earliest" if reset == "earliest" else "latest")
    assert starts.find({P0: "committed", P1: "committed"}, 1.0) == (
        {P0: OffsetAndMetadata(3, "", 7), P1: OffsetAndMetadata(where)},
        None,
    )


def test_start_follows_a_seek_over_the_commit(group: FakeGroup) -> None:
    found, problem = StartPositions(group.member(), group, "error").find(
        {P0: "latest", P1: "earliest", P2: 5}, 1.0
    )
    assert found == {P0: OffsetAndMetadata(9), P1: OffsetAndMetadata(0), P2: OffsetAndMetadata(5)}
    assert problem is None


def test_start_without_reset_and_commit_is_an_error(group: FakeGroup) -> None:
    found, problem = StartPositions(group.member(), group, "error").find(
        {P0: "committed", P1: "committed"}, 1.0
    )
    assert found == {P0: OffsetAndMetadata(3, "", 7)}
    assert problem is not None
    assert not problem.retriable
    assert "orders-1 has no committed offset and 'auto.offset.reset' forbids choosing one" in str(
        problem
    )


def test_start_of_a_silent_leader_is_left_out(group: FakeGroup) -> None:
    found, problem = StartPositions(Deaf(group), group, "latest").find(
        {P0: "committed", P1: "latest", P2: 5}, 1.0
    )
    assert found.keys() == {P1, P2}
    assert problem is not None
    assert problem.retriable
    headless = Headless({"orders": 4})
    found, problem = StartPositions(headless.member(), headless, "latest").find(
        dict.fromkeys((P0, P1, P3), "committed"), 1.0
    )
    assert found == {P1: OffsetAndMetadata(0), P3: OffsetAndMetadata(0)}
    assert problem is not None
    assert problem.partitions.keys() == {P0}
