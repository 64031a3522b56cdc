"""`OffsetTracker` never commits past an unfinished record."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_rebalance.core.model.errors import (
    BrokerError,
    PartitionLostError,
    RebalanceInProgressError,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.group_ports import CommitResult
from dagster_rebalance.kafka.offset_tracker import OffsetTracker
from tests.core.world import tp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

P0, P1 = tp(0), tp(1)


@dataclass(frozen=True)
class Polled:
    """A record of the client."""

    at: TopicPartition
    number: int
    problem: str | None = None

    def topic(self) -> str:
        return self.at.topic

    def partition(self) -> int:
        return self.at.partition

    def offset(self) -> int:
        return self.number

    def error(self) -> str | None:
        return self.problem


class Broker:
    """Stores commits except those in `refuse`, and runs `during` in each request."""

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        self.requests: list[dict[TopicPartition, int]] = []
        self.stored: dict[TopicPartition, int] = {}
        self.refuse: dict[TopicPartition, BrokerError] = {}
        self.during = during

    def commit_offsets(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> CommitResult:
        self.requests.append({at: stored.offset for at, stored in offsets.items()})
        self.during()
        failed = {at: self.refuse[at] for at in offsets if at in self.refuse}
        for at in offsets.keys() - failed:
            assert offsets[at].offset > self.stored.get(at, -1), f"the commit of {at} goes back"
            self.stored[at] = offsets[at].offset
        return CommitResult(frozenset(offsets.keys() - failed), failed)


def tracking(*offsets: int, at: TopicPartition = P0) -> OffsetTracker:
    """A tracker of records of one partition."""
    tracker = OffsetTracker()
    tracker.track(Polled(at, offset) for offset in offsets)
    return tracker


def finish(tracker: OffsetTracker, *offsets: int, at: TopicPartition = P0) -> None:
    for offset in offsets:
        tracker.done(at, offset)


def due(tracker: OffsetTracker) -> dict[TopicPartition, int]:
    return {at: stored.offset for at, stored in tracker.to_commit().items()}


def test_record_finished_out_of_order_waits_for_earlier_records() -> None:
    tracker = tracking(5, 6, 7)
    finish(tracker, 6)
    assert due(tracker) == {}
    finish(tracker, 5)
    assert due(tracker) == {P0: 7}
    finish(tracker, 7)
    assert due(tracker) == {P0: 8}


def test_message_with_an_error_is_ignored() -> None:
    """The end of a partition has an offset and is never processed."""
    tracker = tracking(5)
    end = Polled(P0, 6, "end of partition")
    tracker.track([end])
    tracker.done_record(Polled(P0, 5))
    tracker.commit(Broker())
    assert not tracker.is_busy(P0)
    tracker.track([Polled(P0, 6)])
    tracker.done_record(end)
    assert due(tracker) == {}
    assert tracker.is_busy(P0)


def test_commit_makes_one_request_for_partitions_with_progress() -> None:
    tracker, broker = tracking(0, 1), Broker()
    tracker.track([Polled(P1, 40), Polled(tp(2), 7)])
    finish(tracker, 0)
    finish(tracker, 40, at=P1)
    assert tracker.commit(broker) == {}
    assert tracker.commit(broker) == {}
    finish(tracker, 1)
    tracker.commit(broker)
    assert broker.requests == [{P0: 1, P1: 41}, {P0: 2}]


def test_failed_commit_is_tried_again_unless_the_partition_is_lost() -> None:
    """KIP-429: during a rebalance the partition is still owned."""
    tracker, broker = tracking(0), Broker()
    tracker.track([Polled(P1, 0)])
    finish(tracker, 0)
    finish(tracker, 0, at=P1)
    broker.refuse = {P0: RebalanceInProgressError("rebalancing")}
    assert tracker.commit(broker) == broker.refuse
    broker.refuse = {P0: PartitionLostError("fenced")}
    assert tracker.commit(broker) == broker.refuse
    assert tracker.commit(broker) == {}
    assert broker.requests == [{P0: 1, P1: 1}, {P0: 1}]
    assert tracker.partitions == {P1}


def test_commit_of_an_earlier_ownership_does_not_affect_the_new_one() -> None:
    """The partition returns during the request."""
    broker = Broker()
    tracker = tracking(0, 1, 2)
    finish(tracker, 0, 1)

    def come_back() -> None:
        tracker.forget([P0])
        tracker.track([Polled(P0, 0), Polled(P0, 1)])

    broker.during = come_back
    broker.refuse = {P0: PartitionLostError("fenced")}
    tracker.commit(broker)
    assert tracker.partitions == {P0}
    broker.refuse = {}
    finish(tracker, 0, 1)
    tracker.commit(broker)
    finish(tracker, 0)
    assert due(tracker) == {P0: 1}


def test_error_of_the_whole_request_is_raised_and_loses_nothing() -> None:
    def fail() -> None:
        message = "closed"
        raise BrokerError(message)

    tracker = tracking(0)
    finish(tracker, 0)
    with pytest.raises(BrokerError, match="closed"):
        tracker.commit(Broker(fail))
    assert due(tracker) == {P0: 1}


def test_noted_commit_is_not_repeated() -> None:
    """An older commit that is noted late changes nothing."""
    tracker = tracking(0, 1)
    finish(tracker, 0, 1)
    tracker.note_committed({P0: OffsetAndMetadata(2), P1: OffsetAndMetadata(9)})
    tracker.note_committed({P0: OffsetAndMetadata(1)})
    assert due(tracker) == {}
    assert tracker.partitions == {P0}


def test_committed_records_are_not_kept() -> None:
    tracker, broker = OffsetTracker(), Broker()
    for start in range(0, 1000, 100):
        tracker.track(Polled(P0, offset) for offset in range(start, start + 100))
        finish(tracker, *reversed(range(start, start + 100)))
        tracker.commit(broker)
        (kept,) = tracker._progress.values()
        assert (kept.unfinished, kept.heap) == (set(), [])


def test_done_does_not_wait_for_a_commit_in_flight() -> None:
    tracker = tracking(0, 1)
    worker = threading.Thread(target=tracker.done, args=(P0, 1), daemon=True)

    def work() -> None:
        worker.start()
        worker.join(120)
        assert not worker.is_alive()

    finish(tracker, 0)
    tracker.commit(Broker(work))
    assert due(tracker) == {P0: 2}


def test_second_commit_waits_for_the_first() -> None:
    """It could otherwise be overwritten by the first one."""
    tracker, broker = tracking(0, 1), Broker()
    second = threading.Thread(target=tracker.commit, args=(broker,), daemon=True)

    def overtake() -> None:
        broker.during = lambda: None
        finish(tracker, 1)
        second.start()
        second.join(0.1)
        assert second.is_alive()

    broker.during = overtake
    finish(tracker, 0)
    tracker.commit(broker)
    second.join(120)
    assert broker.requests == [{P0: 1}, {P0: 2}]


def test_nested_commit_does_not_deadlock() -> None:
    """A rebalance callback may run during the request, and commit."""
    tracker, broker = tracking(0), Broker()
    broker.during = lambda: finish(tracker, 0)
    inner = Broker()
    outer = Broker(
        lambda: (
            tracker.note_committed({P0: OffsetAndMetadata(1)})
            if tracker.commit(inner) == {}
            else None
        )
    )
    finish(tracker, 0)
    tracker.commit(outer)
    assert inner.stored == outer.stored == {P0: 1}


def test_records_finished_by_many_threads_are_all_committed() -> None:
    each, workers = 2000, 4
    tracker, places = OffsetTracker(), [tp(number) for number in range(3)]
    begun: set[tuple[TopicPartition, int]] = set()

    def work(share: int) -> None:
        for offset in reversed(range(share, each, workers)):
            for at in places:
                begun.add((at, offset))
                tracker.done(at, offset)

    class Checked(Broker):
        def commit_offsets(
            self, offsets: Mapping[TopicPartition, OffsetAndMetadata]
        ) -> CommitResult:
            for at, stored in offsets.items():
                assert all(
                    (at, offset) in begun for offset in range(self.stored.get(at, 0), stored.offset)
                )
            return super().commit_offsets(offsets)

    tracker.track(Polled(at, offset) for offset in range(each) for at in places)
    threads = [
        threading.Thread(target=work, args=(share,), daemon=True) for share in range(workers)
    ]
    broker = Checked()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        tracker.commit(broker)
    tracker.commit(broker)
    assert broker.stored == dict.fromkeys(places, each)


class Naive:
    """A tracker that keeps every record, and whether it is finished."""

    def __init__(self) -> None:
        self.came: dict[TopicPartition, dict[int, bool]] = {}
        self.stored: dict[TopicPartition, int] = {}

    def track(self, at: TopicPartition, offset: int) -> None:
        self.came.setdefault(at, {})[offset] = False
        self.stored.setdefault(at, offset)

    def done(self, at: TopicPartition, offset: int) -> None:
        if offset in self.came.get(at, {}):
            self.came[at][offset] = True

    def forget(self, at: TopicPartition) -> None:
        self.came.pop(at, None)
        self.stored.pop(at, None)

    def due(self) -> dict[TopicPartition, int]:
        """The first unfinished record, or the offset behind all."""
        reached = {
            at: next((offset for offset in sorted(came) if not came[offset]), max(came) + 1)
            for at, came in self.came.items()
        }
        return {at: offset for at, offset in reached.items() if offset > self.stored[at]}

    def busy(self) -> set[TopicPartition]:
        return {at for at, came in self.came.items() if not all(came.values())} | self.due().keys()


PLACES = st.sampled_from([P0, P1])
OFFSETS = st.sampled_from([0, 1, 4])  # with gaps, as after a compaction
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["track", "track", "done", "done", "done", "forget", "commit", "commit"]),
        PLACES,
        OFFSETS,
        st.sampled_from([None, RebalanceInProgressError, PartitionLostError]),
    ),
    min_size=10,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_tracker_agrees_with_a_list_of_all_records(
    steps: list[tuple[str, TopicPartition, int, type[BrokerError] | None]],
) -> None:
    """Commits fail in part, and records are forgotten, polled again and finished in any order."""
    tracker, naive = OffsetTracker(), Naive()
    for what, at, offset, failure in steps:
        if what == "track":
            tracker.track([Polled(at, offset)])
            naive.track(at, offset)
        elif what == "done":
            tracker.done_record(Polled(at, offset))
            naive.done(at, offset)
        elif what == "forget":
            tracker.forget([at])
            naive.forget(at)
        else:
            broker = Broker()
            broker.refuse = {} if failure is None else {at: failure("refused")}
            failed = tracker.commit(broker)
            assert broker.requests == ([naive.due()] if naive.due() else [])
            assert failed.keys() == broker.refuse.keys() & naive.due().keys()
            naive.stored.update(broker.stored)
            if failed and failure is PartitionLostError:
                naive.forget(at)
        assert due(tracker) == naive.due()
        assert tracker.partitions == naive.came.keys()
        assert tracker.unfinished([P0, P1]) == naive.busy()
        assert tracker.is_busy(at) == (at in naive.busy())
