"""Bounds and committed offsets of partitions if some leaders are unavailable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.claims import StoredPartition, encode
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.events import LastRecorded
from dagster_rebalance.core.model.offsets import (
    Bounds,
    Log,
    LogPosition,
    OffsetAndMetadata,
    TopicPartition,
)
from dagster_rebalance.core.model.topics import StartTime
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.log_bounds import (
    BoundsReader,
    allowed,
    find,
    longest_wait_s,
    read_bounds,
)
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.orchestration.bench import CONFIG
from tests.orchestration.parts import tp

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dagster_rebalance.kafka.group_ports import OffsetAndTimestamp


def stage() -> tuple[FakeGroup, RebalanceAwareConsumer]:
    group = FakeGroup({"orders": 2})
    for number in (0, 1):
        group.produce(tp(number), 10)
    return group, RebalanceAwareConsumer(
        CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )


def test_responses_about_more_partitions_have_more_time() -> None:
    assert [longest_wait_s(range(count)) for count in (1, 2_499, 2_500, 10_000)] == [
        1.5,
        1.5,
        3.0,
        7.5,
    ]


def test_read_beyond_reads_high_watermarks_at_intervals() -> None:
    group, consumer = stage()
    group.open_transaction(tp(0), 4)
    reader = BoundsReader(consumer, group.clock, lambda _: None)
    assert reader.read_beyond([tp(0)]) == {tp(0): Bounds(0, 4, high_watermark=10)}
    assert reader.read_beyond([tp(0)]) == {tp(0): Bounds(0, 4)}
    group.clock.advance(30)
    assert reader.read_beyond([tp(0)]) == {tp(0): Bounds(0, 4, high_watermark=10)}


def test_read_beyond_shows_the_end_of_a_transaction_once() -> None:
    group, consumer = stage()
    group.open_transaction(tp(0), 4)
    reader = BoundsReader(consumer, group.clock, lambda _: None)
    reader.read_beyond([tp(0)])
    group.open_transaction(tp(0), None)
    for mark in (10, None):
        group.clock.advance(30)
        assert reader.read_beyond([tp(0)]) == {tp(0): Bounds(0, 10, high_watermark=mark)}


def test_reader_returns_the_same_bounds_until_they_change() -> None:
    group, consumer = stage()
    reader = BoundsReader(consumer, group.clock, lambda _: None)
    first = reader.read_beyond([tp(0), tp(1)])
    group.clock.advance(30)
    group.produce(tp(1))
    for found in (reader.read_beyond([tp(0), tp(1)]), reader.read([tp(0), tp(1)])):
        assert found[tp(0)] is first[tp(0)]
        assert found[tp(1)] == Bounds(0, 11)


def test_find_looks_a_start_time_up_without_a_commit() -> None:
    group, consumer = stage()
    group.produce(tp(0), 5, timestamp=60_000)
    group.committed[tp(1)] = OffsetAndMetadata(3)
    bounds = read_bounds(consumer, [tp(0), tp(1)])
    found = find(consumer, bounds, {}, start=StartTime(1))
    assert [found[tp(n)].offset_at_start_time for n in (0, 1)] == [10, None]
    assert find(consumer, bounds, {}, start=StartTime(60_001))[tp(0)].offset_at_start_time is None
    assert find(consumer, bounds, {})[tp(0)].offset_at_start_time is None


def test_find_leaves_out_a_leader_without_the_start_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, consumer = stage()
    answers = group.offsets_for_times
    retriable = True

    def offsets_for_times(
        timestamps: Mapping[TopicPartition, int], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        if tp(1) in timestamps:
            msg = "away"
            raise BrokerError(msg, retriable=retriable, partitions={tp(1): msg})
        return answers(timestamps, timeout_s)

    monkeypatch.setattr(group, "offsets_for_times", offsets_for_times)
    reader = BoundsReader(consumer, group.clock, lambda _: None, StartTime(0))
    assert reader.find([tp(0), tp(1)], {}).keys() == {tp(0)}
    retriable = False
    with pytest.raises(BrokerError, match="away"):
        reader.find([tp(0), tp(1)], {})


@pytest.mark.parametrize("kept", [{tp(1)}, {tp(0), tp(1)}], ids=["one", "all"])
def test_find_reports_the_partition_of_an_open_transaction_alone(
    monkeypatch: pytest.MonkeyPatch, kept: set[TopicPartition]
) -> None:
    group, consumer = stage()
    answers = consumer.committed

    def committed(
        partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        if waiting := kept.intersection(partitions):
            msg = "a transaction is still open"
            raise BrokerError(msg, retriable=True, partitions=dict.fromkeys(waiting, msg))
        return answers(partitions, timeout_s)

    monkeypatch.setattr(consumer, "committed", committed)
    reader = BoundsReader(consumer, group.clock, lambda _: None)
    found = reader.find([tp(0), tp(1)], {})
    assert {p for p in found if found[p].refused == "a transaction is still open"} == kept
    kept.clear()
    assert not any(at.refused for at in reader.find([tp(0), tp(1)], {}).values())


def test_read_beyond_reads_first_offsets_at_intervals() -> None:
    group, consumer = stage()
    reader = BoundsReader(consumer, group.clock, lambda _: None)
    assert reader.read_beyond([tp(0)])[tp(0)].start == 0
    group.delete_before(tp(0), 3)
    assert reader.read_beyond([tp(0)])[tp(0)].start == 0
    assert reader.read([tp(0)])[tp(0)].start == 3, "a new assignment is judged by current bounds"
    group.delete_before(tp(0), 5)
    assert reader.read_beyond([tp(0)])[tp(0)].start == 3
    group.clock.advance(30)
    assert reader.read_beyond([tp(0)])[tp(0)].start == 5


def test_read_beyond_with_a_silent_leader_lacks_high_watermarks() -> None:
    group, consumer = stage()
    group.silence(tp(1))
    reader = BoundsReader(consumer, group.clock, lambda _: None)
    assert reader.read_beyond([tp(0), tp(1)]) == {tp(0): Bounds(0, 10)}


def test_find_leaves_out_an_unverified_position() -> None:
    group, consumer = stage()
    for number in (0, 1):
        group.committed[tp(number)] = encode(StoredPartition(5, log=Log(leader_epoch=1)))
    bounds = dict.fromkeys((tp(0), tp(1)), Bounds(0, 10, leader_epoch=2))
    group.silence(tp(1))
    found = find(consumer, bounds, {tp(0): LastRecorded(5)})
    assert list(found) == [tp(0)]
    assert (found[tp(0)].is_truncated, found[tp(0)].recorded) == (False, LastRecorded(5))


def test_find_waits_longer_for_slow_leaders() -> None:
    group, consumer = stage()
    group.committed[tp(0)] = encode(StoredPartition(5, log=Log(leader_epoch=0)))
    group.elect(tp(0))
    waited: list[float] = []
    notes: list[str] = []

    def truncated(
        positions: Mapping[TopicPartition, LogPosition], timeout_s: float
    ) -> dict[TopicPartition, bool]:
        waited.append(timeout_s)
        return dict.fromkeys(positions, False) if timeout_s > 2 else {}

    group.truncated = truncated  # type: ignore[method-assign,assignment]
    reader = BoundsReader(consumer, group.clock, notes.append)
    found = [list(reader.find([tp(0)], {})) for _ in range(3)]
    assert found == [[], [tp(0)], []]
    assert waited == [1.5, 3.0, 1.5]
    said = "did not verify the committed offset, or report the start position, within"
    assert notes == [f"the leaders of orders-0 {said} 1.5 s"] * 2


def test_find_notes_silent_leaders_until_the_longest_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    group, consumer = stage()
    group.committed[tp(0)] = encode(StoredPartition(5, log=Log(leader_epoch=0)))
    group.elect(tp(0))
    waited: list[float] = []

    def truncated(_: object, timeout_s: float) -> dict[TopicPartition, bool]:
        waited.append(timeout_s)
        return {}

    monkeypatch.setattr(group, "truncated", truncated)
    notes: list[str] = []
    reader = BoundsReader(consumer, group.clock, notes.append)
    for _ in range(5):
        assert not reader.find([tp(0)], {})
    assert waited == [1.5, 3.0, 6.0, 6.0, 6.0]
    assert [note.rsplit(" ", 2)[1] for note in notes] == ["1.5", "3"]


def test_find_reports_the_id_of_a_recreated_topic() -> None:
    group, consumer = stage()
    group.recreate_topic("orders")
    (found,) = find(consumer, {tp(0): Bounds(0, 10)}, {}).values()
    assert found.stored is None
    assert found.topic_id == "id-1"


def test_reader_refuses_an_unreadable_topic_alone() -> None:
    group, consumer = stage()
    closed = TopicPartition("payments", 0)
    group.add_partitions("payments", 1)
    group.forbid("payments")
    notes: list[str] = []
    reader = BoundsReader(consumer, group.clock, notes.append)
    found = reader.find([tp(0), closed], {})
    assert found[tp(0)].refused == ""
    assert found[tp(0)].bounds == Bounds(0, 10)
    assert "ACL READ" in found[closed].refused
    assert reader.read_beyond([tp(0), closed]).keys() == {tp(0)}
    assert reader.refused.keys() == {closed}
    assert len(notes) == 1
    group.forbid()
    group.clock.advance(2)
    assert reader.find([tp(0), closed], {})[closed].refused == ""
    assert not reader.refused


def test_find_leaves_out_unreadable_topics() -> None:
    group, consumer = stage()
    closed = TopicPartition("payments", 0)
    group.add_partitions("payments", 1)
    bounds = read_bounds(consumer, [tp(0), closed])
    group.forbid("payments")
    found = find(consumer, bounds, {})
    assert "ACL READ" in found[closed].refused
    assert found[tp(0)].bounds == Bounds(0, 10)


def test_allowed_raises_if_all_partitions_are_refused() -> None:

    def ask(_partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        msg = "the group may not be read"
        raise BrokerError(msg)

    with pytest.raises(BrokerError, match="the group"):
        allowed(ask, [tp(0)])
