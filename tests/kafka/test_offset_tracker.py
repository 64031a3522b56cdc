"""Commits follow the order of the offsets, whatever finishes first.

The tracker never passes over an unfinished record.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.model.errors import (
    BrokerError,
    PartitionLostError,
    RebalanceInProgressError,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.offset_tracker import OffsetTracker
from tests.core.world import tp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

P0, P1 = tp(0), tp(1)


@dataclass(frozen=True)
class Polled:
    """A record as the client gives it."""

    at: TopicPartition
    number: int
    problem: str | None = None

    def topic(self) -> str:
        """Its topic."""
        return self.at.topic

    def partition(self) -> int:
        """Its partition."""
        return self.at.partition

    def offset(self) -> int:
        """Its offset."""
        return self.number

    def error(self) -> str | None:
        """What it is instead of a record."""
        return self.problem


@dataclass(frozen=True)
class Outcome:
    """What became of a commit."""

    committed: frozenset[TopicPartition]
    failed: Mapping[TopicPartition, BrokerError] = field(default_factory=dict)


class Broker:
    """Stores commits, except for the partitions that it is told to refuse.

    It can run something of the test's during a request.
    """

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        self.requests: list[dict[TopicPartition, int]] = []
        self.stored: dict[TopicPartition, int] = {}
        self.refuse: dict[TopicPartition, BrokerError] = {}
        self.during = during

    def commit_offsets(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> Outcome:
        """Store what is not refused; it must have grown."""
        self.requests.append({at: stored.offset for at, stored in offsets.items()})
        self.during()
        failed = {at: self.refuse[at] for at in offsets if at in self.refuse}
        for at in offsets.keys() - failed:
            assert offsets[at].offset > self.stored.get(at, -1), f"the commit of {at} goes back"
            self.stored[at] = offsets[at].offset
        return Outcome(frozenset(offsets.keys() - failed), failed)


def tracking(*offsets: int, at: TopicPartition = P0) -> OffsetTracker:
    """A tracker of records of one partition."""
    tracker = OffsetTracker()
    tracker.track(Polled(at, offset) for offset in offsets)
    return tracker


def finish(tracker: OffsetTracker, *offsets: int, at: TopicPartition = P0) -> None:
    """Finish records."""
    for offset in offsets:
        tracker.done(at, offset)


def due(tracker: OffsetTracker) -> dict[TopicPartition, int]:
    """What may be committed."""
    return {at: stored.offset for at, stored in tracker.to_commit().items()}


def test_a_record_that_finished_out_of_order_waits_for_the_ones_before_it() -> None:
    """A commit at 7 would say that 5 is done."""
    tracker = tracking(5, 6, 7)
    finish(tracker, 6)
    assert due(tracker) == {}
    finish(tracker, 5)
    assert due(tracker) == {P0: 7}
    finish(tracker, 7)
    assert due(tracker) == {P0: 8}


def test_offsets_that_no_record_has_are_passed_over() -> None:
    """Transactions and compaction leave gaps, also before the first record.

    Nobody will ever finish an offset that has no record.
    """
    tracker = tracking(3, 10, 500)
    finish(tracker, 3)
    assert due(tracker) == {P0: 10}
    finish(tracker, 500, 10)
    assert due(tracker) == {P0: 501}


def test_what_the_client_has_to_say_is_no_record() -> None:
    """The end of a partition carries an offset and is never processed.

    As a record it would hold up all commits, or finish the next record.
    """
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


def test_marks_of_what_is_not_tracked_and_repeated_marks_change_nothing() -> None:
    """Workers may retry, and need not know what was given up."""
    tracker = tracking(5, 6)
    finish(tracker, 99, 4)
    finish(tracker, 5, at=P1)
    tracker.done(TopicPartition("returns", 0), 5)
    assert due(tracker) == {}
    finish(tracker, 5, 5)
    assert due(tracker) == {P0: 6}


def test_all_partitions_are_committed_in_one_request_and_only_what_has_grown() -> None:
    """A request per record, or per partition, is what makes commits slow."""
    tracker, broker = tracking(0, 1), Broker()
    tracker.track([Polled(P1, 40), Polled(tp(2), 7)])
    finish(tracker, 0)
    finish(tracker, 40, at=P1)
    assert tracker.commit(broker) == {}
    assert tracker.commit(broker) == {}
    finish(tracker, 1)
    tracker.commit(broker)
    assert broker.requests == [{P0: 1, P1: 41}, {P0: 2}]


def test_a_commit_in_a_rebalance_is_offered_again() -> None:
    """KIP-429: this member still owns the partition, so the tracker offers its offset again.

    The tracker does not send again what the broker took of the same request.
    """
    tracker, broker = tracking(0), Broker()
    tracker.track([Polled(P1, 0)])
    finish(tracker, 0)
    finish(tracker, 0, at=P1)
    broker.refuse = {P0: RebalanceInProgressError("rebalancing")}
    assert tracker.commit(broker) == broker.refuse
    broker.refuse = {}
    tracker.commit(broker)
    assert broker.requests == [{P0: 1, P1: 1}, {P0: 1}]


def test_a_partition_that_a_commit_finds_lost_is_forgotten() -> None:
    """It belongs to somebody else: to try again would be wrong, and to wait for its work too."""
    tracker, broker = tracking(0, 1), Broker()
    finish(tracker, 0)
    broker.refuse = {P0: PartitionLostError("fenced")}
    assert tracker.commit(broker) == broker.refuse
    assert tracker.partitions == frozenset()
    assert tracker.commit(broker) == {}


def test_the_answer_to_a_commit_of_an_earlier_ownership_says_nothing_about_the_new_one() -> None:
    """The partition came back while the request was on its way.

    Neither the loss nor the success of that commit belongs to the new ownership.
    """
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


def test_an_error_that_concerns_the_whole_request_reaches_the_caller_and_loses_nothing() -> None:
    """A closed consumer, for example."""

    def fail() -> None:
        message = "closed"
        raise BrokerError(message)

    tracker = tracking(0)
    finish(tracker, 0)
    with pytest.raises(BrokerError, match="closed"):
        tracker.commit(Broker(fail))
    assert due(tracker) == {P0: 1}


def test_what_was_committed_by_other_means_is_not_offered_again() -> None:
    """Transactions, rebalance callbacks and asyncio have commits of their own.

    A late note of an older commit takes nothing back.
    """
    tracker = tracking(0, 1)
    finish(tracker, 0, 1)
    tracker.note_committed({P0: OffsetAndMetadata(2), P1: OffsetAndMetadata(9)})
    tracker.note_committed({P0: OffsetAndMetadata(1)})
    assert due(tracker) == {}
    assert tracker.partitions == {P0}


def test_a_partition_is_busy_until_its_last_record_is_committed() -> None:
    """Released between its end and its commit, the record would be done again by the next owner."""
    tracker, broker = tracking(0), Broker()
    assert tracker.is_busy(P0)
    tracker.commit(broker)
    finish(tracker, 0)
    assert tracker.unfinished([P0, P1]) == {P0}
    tracker.commit(broker)
    assert not tracker.is_busy(P0)
    assert not tracker.is_busy(P1)
    assert tracker.unfinished([P0, P1]) == frozenset()


def test_a_late_mark_of_an_earlier_ownership_is_ignored() -> None:
    """The partition was forgotten: another member may be anywhere in it."""
    tracker = tracking(0, 1)
    tracker.forget([P0, P1])
    finish(tracker, 0, 1)
    assert due(tracker) == {}
    assert not tracker.is_busy(P0)
    tracker.track([Polled(P0, 1)])
    assert due(tracker) == {}


def test_a_late_mark_counts_when_its_record_was_tracked_again() -> None:
    """The partition came back with the same record.

    The late worker has processed that record, which is what a commit says.
    """
    tracker = tracking(0)
    tracker.forget([P0])
    tracker.track([Polled(P0, 0)])
    finish(tracker, 0)
    assert due(tracker) == {P0: 1}


def test_after_a_seek_back_and_a_forget_the_same_offsets_are_committed_again() -> None:
    """To process records once more, on purpose, must survive a restart in the middle of it."""
    tracker = tracking(0, 1)
    finish(tracker, 0, 1)
    tracker.commit(Broker())
    tracker.forget([P0])
    tracker.track([Polled(P0, 0), Polled(P0, 1)])
    finish(tracker, 0)
    assert due(tracker) == {P0: 1}


def test_a_record_that_comes_once_more_is_unfinished_once_more() -> None:
    """It is being worked on, so nothing behind it is committed; nor does a commit go back to it."""
    tracker, broker = tracking(0, 1, 2), Broker()
    finish(tracker, 0, 1)
    tracker.commit(broker)
    tracker.track([Polled(P0, 2), Polled(P0, 0)])
    finish(tracker, 2)
    assert due(tracker) == {}
    assert tracker.is_busy(P0)
    finish(tracker, 0)
    tracker.commit(broker)
    assert broker.stored == {P0: 3}


def test_forgetting_one_partition_leaves_the_others_of_its_topic() -> None:
    """Retained partitions go on as if nothing had happened."""
    tracker = tracking(0)
    tracker.track([Polled(P1, 0)])
    tracker.forget([P0])
    finish(tracker, 0, at=P1)
    assert tracker.partitions == {P1}
    assert due(tracker) == {P1: 1}


def test_nothing_is_kept_of_what_is_finished_and_committed() -> None:
    """A process that runs for months must not grow."""
    tracker, broker = OffsetTracker(), Broker()
    for start in range(0, 1000, 100):
        tracker.track(Polled(P0, offset) for offset in range(start, start + 100))
        finish(tracker, *reversed(range(start, start + 100)))
        tracker.commit(broker)
        (kept,) = tracker._all()
        assert (kept.unfinished, kept.heap) == (set(), [])


def test_marks_do_not_wait_for_a_commit_on_its_way() -> None:
    """A slow broker must slow down commits, not the work."""
    tracker = tracking(0, 1)
    worker = threading.Thread(target=tracker.done, args=(P0, 1), daemon=True)

    def work() -> None:
        worker.start()
        worker.join(10)
        assert not worker.is_alive()

    finish(tracker, 0)
    tracker.commit(Broker(work))
    assert due(tracker) == {P0: 2}


def test_a_second_commit_waits_for_the_first() -> None:
    """Should it overtake, the first one would take the offset back."""
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
    second.join(10)
    assert broker.requests == [{P0: 1}, {P0: 2}]


def test_a_commit_within_a_commit_does_not_wait_for_itself() -> None:
    """A rebalance callback may run inside of the request, and commit what is left."""
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


def test_many_threads_finish_records_while_another_one_commits() -> None:
    """No mark gets lost, and at no time a record that nobody has finished is behind a commit."""
    each, workers = 2000, 4
    tracker, places = OffsetTracker(), [tp(number) for number in range(3)]
    begun: set[tuple[TopicPartition, int]] = set()

    def work(share: int) -> None:
        for offset in reversed(range(share, each, workers)):
            for at in places:
                begun.add((at, offset))
                tracker.done(at, offset)

    class Checked(Broker):
        def commit_offsets(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> Outcome:
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
    """The tracker as one would explain it: a list of all that came, and whether it is finished."""

    def __init__(self) -> None:
        self.came: dict[TopicPartition, dict[int, bool]] = {}
        self.stored: dict[TopicPartition, int] = {}

    def track(self, at: TopicPartition, offset: int) -> None:
        """Unfinished, also when it comes once more."""
        self.came.setdefault(at, {})[offset] = False
        self.stored.setdefault(at, offset)

    def done(self, at: TopicPartition, offset: int) -> None:
        """Finished, if it came."""
        if offset in self.came.get(at, {}):
            self.came[at][offset] = True

    def forget(self, at: TopicPartition) -> None:
        """Nothing came."""
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
        """Where something is unfinished or not committed."""
        return {at for at, came in self.came.items() if not all(came.values())} | self.due().keys()


PLACES = st.sampled_from([P0, P1])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("track"), PLACES, st.integers(0, 4)),
        st.tuples(st.just("done"), PLACES, st.integers(0, 4)),
        st.tuples(st.just("forget"), PLACES, st.just(0)),
        st.tuples(st.just("commit"), PLACES, st.sampled_from([0, 1, 2])),
    ),
    min_size=10,
    max_size=60,
)


@given(STEPS)
def test_the_tracker_agrees_with_a_list_of_all_that_came(
    steps: list[tuple[str, TopicPartition, int]],
) -> None:
    """The tracker is compared with a list of all that came.

    Records come and are finished in any order, are forgotten and delivered again, and commits fail
    in part.
    """
    tracker, naive = OffsetTracker(), Naive()
    failures = (None, RebalanceInProgressError("rebalancing"), PartitionLostError("fenced"))
    for what, at, number in steps:
        if what == "track":
            tracker.track([Polled(at, number)])
            naive.track(at, number)
        elif what == "done":
            tracker.done_record(Polled(at, number))
            naive.done(at, number)
        elif what == "forget":
            tracker.forget([at])
            naive.forget(at)
        else:
            broker, failure = Broker(), failures[number]
            broker.refuse = {at: failure} if failure is not None else {}
            failed = tracker.commit(broker)
            assert broker.requests == ([naive.due()] if naive.due() else [])
            assert failed.keys() == broker.refuse.keys() & naive.due().keys()
            naive.stored.update(broker.stored)
            if failed and isinstance(failure, PartitionLostError):
                naive.forget(at)
        assert due(tracker) == naive.due()
        assert tracker.partitions == naive.came.keys()
        assert tracker.unfinished([P0, P1]) == naive.busy()
