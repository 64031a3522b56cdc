"""Ctrl-C and the user's exceptions at moments when the group or the caller is owed something."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

import pytest

from dagster_rebalance.core.model.errors import BrokerError, PartitionLostError
from dagster_rebalance.core.model.events import (
    LostReason,
    PartitionsAssigned,
    PartitionsLost,
    PartitionsRevoked,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.consumer.listener import RebalanceListener
from dagster_rebalance.kafka.group_ports import CallbackFailed, CommitAnswered, CommitResult
from dagster_rebalance.kafka.reading import fetcher as fetcher_module
from dagster_rebalance.testing.fake_group import FakeGroup, FakeMember
from tests.kafka.fake_log import fake_log

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import FrameType

    from confluent_kafka import Message

    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer

CONFIG = {"bootstrap.servers": "nobody:9092", "group.id": "etl"}
P0, P1, P2, P3 = EVERYTHING = tuple(TopicPartition("orders", number) for number in range(4))


class InterruptedMember(FakeMember):
    """A member that gets one Ctrl-C in each call that is named in `interrupted`."""

    def __init__(self, group: FakeGroup) -> None:
        super().__init__(group)
        self.interrupted: set[str] = set()
        self.answers = True
        self.clock = group.clock

    def release(self) -> None:
        """Interrupted after it was done, or before."""
        self._interrupt("before the release")
        super().release()
        self._interrupt("after the release")

    def unsubscribe(self, timeout_s: float = 10.0) -> None:
        """Takes all the time it is given."""
        super().unsubscribe(timeout_s)
        self.clock.advance(timeout_s)

    def settle(self, timeout_s: float = 0.0) -> bool:
        """Interrupted, or in vain."""
        self._interrupt("settle")
        if self.answers:
            return super().settle(timeout_s)
        self.clock.advance(timeout_s)
        return False

    def _interrupt(self, call: str) -> None:
        if call in self.interrupted:
            self.interrupted.remove(call)
            raise KeyboardInterrupt


class Side:
    """A consumer with its member at hand."""

    def __init__(self, group: FakeGroup, *, same_poll: bool = False) -> None:
        self.member = InterruptedMember(group)
        self.consumer = RebalanceAwareConsumer(
            CONFIG,
            fetch=False,
            member=self.member,
            cluster=group,
            clock=group.clock,
            complete_revoke_in_same_poll=same_poll,
        )
        self.consumer.subscribe(["orders"])
        self.consumer.poll(0.1)


@pytest.fixture
def group() -> FakeGroup:
    """A group without members, with a topic of four partitions."""
    return FakeGroup({"orders": 4})


@pytest.mark.parametrize("when", ["before the release", "after the release"])
@pytest.mark.parametrize("same_poll", [False, True])
def test_a_release_that_was_interrupted_is_made_up_for(
    group: FakeGroup, when: str, *, same_poll: bool
) -> None:
    """Nobody else would ever give the partitions up: they would be neither read nor handed over."""
    blue = Side(group, same_poll=same_poll)
    green = Side(group)
    blue.member.interrupted.add(when)
    if not same_poll:
        blue.consumer.poll(0.1)
    with pytest.raises(KeyboardInterrupt):
        blue.consumer.poll(0.1)
    blue.consumer.poll(0.1)
    green.consumer.poll(0.1)
    assert blue.consumer.assignment() == {P0, P1}
    assert green.consumer.assignment() == {P2, P3}
    blue.consumer.poll(0.1)
    assert not blue.consumer.get_lost_partitions()


class Interrupted(RebalanceListener):
    """A listener in which somebody presses Ctrl-C."""

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Press it."""
        self._press(partitions, consumer)

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Press it."""
        self._press(partitions, consumer)

    def _press(self, *_: object) -> None:
        raise KeyboardInterrupt


def test_what_was_told_behind_an_interrupted_callback_is_carried_out_by_the_next_poll(
    group: FakeGroup,
) -> None:
    """A revoke request that nobody heard of would never be answered."""
    blue = Side(group)
    blue.consumer.set_rebalance_listener(Interrupted())
    blue.member.deliver(PartitionsAssigned(()))
    green = Side(group)
    with pytest.raises(KeyboardInterrupt):
        blue.consumer.poll(0.1)
    blue.consumer.set_rebalance_listener(None)
    for _ in range(3):
        blue.consumer.poll(0.1)
        green.consumer.poll(0.1)
    assert green.consumer.assignment()


def test_a_close_that_is_interrupted_leaves_the_group_all_the_same(group: FakeGroup) -> None:
    """A second `close` does nothing, so the partitions would belong to nobody who reads them."""
    blue = Side(group)
    blue.consumer.set_rebalance_listener(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        blue.consumer.close()
    assert not group.members
    blue.consumer.close()


def test_what_a_callback_of_the_settings_raises_reaches_the_caller_once(group: FakeGroup) -> None:
    """After everything else of the poll was carried out."""
    blue = Side(group)
    problem = ValueError("a bug of the user's")
    blue.member.deliver(CallbackFailed(problem))
    green = Side(group)
    with pytest.raises(ValueError, match="a bug of the user's"):
        blue.consumer.poll(0.1)
    assert blue.consumer.get_to_be_revoked_partitions() == {P2, P3}
    for _ in range(2):
        blue.consumer.poll(0.1)
    green.consumer.poll(0.1)
    assert green.consumer.assignment() == {P2, P3}


def test_what_a_poll_that_raises_has_found_is_told_by_the_next_one(group: FakeGroup) -> None:
    """A loop that logs the exception and polls again could otherwise never delay the revoke.

    It would give its work away.
    """
    blue = Side(group)
    green = Side(group)
    blue.member.fail(BrokerError("a topic is gone"))
    with pytest.raises(BrokerError, match="a topic is gone"):
        blue.consumer.poll(0.1)
    before = group.clock()
    blue.consumer.poll(60)
    assert group.clock() == before, "it returns at once"
    assert blue.consumer.get_to_be_revoked_partitions() == {P2, P3}
    assert blue.consumer.delay_revoke({P2, P3})
    green.consumer.poll(0.1)
    assert not green.consumer.assignment()


def test_a_poll_that_raises_ends_no_delay(group: FakeGroup) -> None:
    """Who delays after each poll has not been asked."""
    blue = Side(group)
    green = Side(group)
    blue.consumer.poll(0.1)
    blue.consumer.delay_revoke({P2, P3})
    blue.member.fail(BrokerError("a topic is gone"))
    with pytest.raises(BrokerError, match="a topic is gone"):
        blue.consumer.poll(0.1)
    blue.consumer.poll(0.1)
    assert blue.consumer.delay_revoke({P2, P3})
    green.consumer.poll(0.1)
    assert blue.consumer.assignment() == set(EVERYTHING)


def test_a_loss_that_a_poll_met_before_it_raised_is_told_by_the_next_one(group: FakeGroup) -> None:
    """Work on a lost partition would go on, beside that of its new owner."""
    blue = Side(group)
    blue.member.deliver(PartitionsLost((P0,), LostReason.FENCED))
    blue.member.fail(BrokerError("a topic is gone"))
    with pytest.raises(BrokerError, match="a topic is gone"):
        blue.consumer.poll(0.1)
    told = blue.consumer.poll_with_rebalance(0.1)
    assert told.lost == blue.consumer.get_lost_partitions() == {P0}
    assert told.events[-1] == PartitionsLost((P0,), LostReason.FENCED)
    assert not blue.consumer.poll_with_rebalance(0.1).events
    assert not blue.consumer.get_lost_partitions()


def refused_metadata(side: Side) -> None:
    """With the identity of the next membership, the broker would take the offsets of what is lost.

    A transaction could then undo what the next owner has committed.
    """
    with pytest.raises(BrokerError, match="orders-0 lost, which no poll has told yet") as caught:
        side.consumer.group_metadata()
    assert caught.value.retriable


def test_nobody_gets_the_metadata_of_the_group_after_a_loss_in_a_poll_that_raised(
    group: FakeGroup,
) -> None:
    """The caller goes on with its transaction, because it has not been told."""
    blue = Side(group)
    blue.member.deliver(PartitionsLost((P0,), LostReason.FENCED))
    blue.member.fail(BrokerError("a topic is gone"))
    with pytest.raises(BrokerError, match="a topic is gone"):
        blue.consumer.poll(0.1)
    refused_metadata(blue)
    blue.consumer.poll(0.1)
    assert blue.consumer.get_lost_partitions() == {P0}
    assert blue.consumer.group_metadata().group_id == "etl"


def test_nobody_gets_the_metadata_of_the_group_after_a_loss_behind_ctrl_c(
    group: FakeGroup,
) -> None:
    """The member has told the loss, and the callback before it was interrupted."""
    blue = Side(group)
    blue.consumer.set_rebalance_listener(Interrupted())
    blue.member.deliver(PartitionsAssigned(()))
    blue.member.deliver(PartitionsLost((P0,), LostReason.FENCED))
    with pytest.raises(KeyboardInterrupt):
        blue.consumer.poll(0.1)
    blue.consumer.set_rebalance_listener(None)
    refused_metadata(blue)
    blue.consumer.poll(0.1)
    assert blue.consumer.group_metadata().group_id == "etl"


class AskOnLoss(RebalanceListener):
    """Asks for the metadata in each callback of a loss."""

    def __init__(self) -> None:
        self.answers = 0

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Nothing to do."""

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Nothing to do."""

    def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Ask."""
        consumer.group_metadata()
        self.answers += 1


def test_the_callback_of_the_last_loss_gets_the_metadata_of_the_group(group: FakeGroup) -> None:
    """It is told of the loss; of one that is behind it in the same poll it is not."""
    blue, listener = Side(group), AskOnLoss()
    blue.consumer.set_rebalance_listener(listener)
    blue.member.deliver(PartitionsLost((P1,), LostReason.FENCED))
    blue.member.deliver(PartitionsLost((P0,), LostReason.FENCED))
    with pytest.raises(BrokerError, match="orders-0 lost, which no poll has told yet"):
        blue.consumer.poll(0.1)
    assert listener.answers == 1


def test_what_an_interrupted_poll_left_behind_ends_with_an_unsubscribe(group: FakeGroup) -> None:
    """An assignment of before would be read beside its new owner."""
    blue = Side(group)
    blue.member.deliver(PartitionsAssigned((P0, P1)))
    blue.consumer.set_rebalance_listener(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        blue.consumer.poll(0.1)
    blue.consumer.set_rebalance_listener(None)
    blue.consumer.unsubscribe()
    blue.consumer.subscribe(["orders"])
    green = Side(group)
    green.consumer.poll(0)
    blue.consumer.poll(0)
    assert blue.consumer.assignment() == blue.member.assignment()


def test_events_of_an_unsubscribe_are_told_by_the_next_poll(group: FakeGroup) -> None:
    """Without them the same partitions would come twice in a row."""
    blue = Side(group)
    blue.consumer.unsubscribe()
    blue.consumer.subscribe(["orders"])
    events = blue.consumer.poll_with_rebalance(0.1).events
    assert events == (PartitionsRevoked(EVERYTHING), PartitionsAssigned(EVERYTHING))


def test_a_commit_for_a_loss_that_a_timed_commit_has_found_is_refused(group: FakeGroup) -> None:
    """The caller has not been told, and the partition may be back already."""
    blue = Side(group)
    blue.consumer.poll(0.1)
    blue.member.deliver(PartitionsLost((P0,), LostReason.FENCED))
    blue.member.deliver(PartitionsAssigned((P0, P1)))
    blue.consumer.commit_offsets({P1: OffsetAndMetadata(1)}, 0.1)
    result = blue.consumer.commit_offsets({P0: OffsetAndMetadata(1)})
    assert isinstance(result.failed[P0], PartitionLostError)
    blue.consumer.poll(0.1)
    assert blue.consumer.commit_offsets({P0: OffsetAndMetadata(1)}).committed == {P0}


class CommitLate(RebalanceListener):
    """Commits what was read of P0 in each callback of an assignment."""

    def __init__(self) -> None:
        self.results: list[CommitResult] = []

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Commit, as a listener does that knows nothing of the loss."""
        try:
            consumer.commit_sync({P0: OffsetAndMetadata(10)})
        except PartitionLostError as error:
            self.results.append(CommitResult(frozenset(), {P0: error}))
        else:
            self.results.append(CommitResult(frozenset({P0})))

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Nothing to do."""


def test_a_commit_in_a_callback_is_refused_for_a_loss_that_is_told_behind_it(
    group: FakeGroup,
) -> None:
    """The partition is back in the same poll, and another owner has committed in between."""
    blue, listener = Side(group), CommitLate()
    blue.consumer.poll(0.1)
    group.committed[P0] = OffsetAndMetadata(50)
    blue.consumer.set_rebalance_listener(listener)
    blue.member.deliver(PartitionsAssigned((P1,)))
    blue.member.deliver(PartitionsLost((P0,), LostReason.FENCED))
    blue.member.deliver(PartitionsAssigned((P0,)))
    blue.consumer.poll(0.1)
    assert [result.committed for result in listener.results] == [frozenset(), {P0}]


def test_nobody_gets_the_metadata_of_the_group_after_a_loss_that_a_timed_commit_has_found(
    group: FakeGroup,
) -> None:
    """The commit has taken the news from the member, and the next poll tells it."""
    blue = Side(group)
    blue.member.deliver(PartitionsLost((P0,), LostReason.FENCED))
    blue.member.deliver(PartitionsAssigned((P0, P1)))
    blue.consumer.commit_offsets({P1: OffsetAndMetadata(1)}, 0.1)
    refused_metadata(blue)
    blue.consumer.poll(0.1)
    assert blue.consumer.group_metadata().group_id == "etl"


def test_records_that_were_read_when_ctrl_c_came_are_returned_by_the_next_poll(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has seen them, and a commit of the positions would skip them for good."""
    log = fake_log(group, monkeypatch, {0: 3})
    consumer = RebalanceAwareConsumer(
        CONFIG, member=group.member(), cluster=group, clock=group.clock
    )
    consumer.subscribe(["orders"])
    assert [record.offset() for record in consumer.poll(0.1, 1)] == [0]
    log.consume, consume = interrupted_after_the_first(log.consume), log.consume  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        consumer.poll(0.1)
    log.consume = consume  # type: ignore[method-assign]
    consumer.commit_sync()
    assert group.committed[P0].offset == 1
    assert [record.offset() for record in consumer.poll(0.1)] == [1, 2]
    consumer.close()


def interrupted_after_the_first(
    consume: Callable[[int, float], list[Message]],
) -> Callable[[int, float], list[Message]]:
    """Return nothing first, so that the poll waits; then records; then raise Ctrl-C."""
    answers = iter([lambda *_: [], consume])

    def interrupted(count: int, timeout_s: float) -> list[Message]:
        for answer in answers:
            return answer(count, timeout_s)
        raise KeyboardInterrupt

    return interrupted


class PressedError(Exception):
    """Raised by a signal handler."""


def is_of_the_package(frame: FrameType | None) -> bool:
    """Whether the package itself is at work.

    A fake is not, and neither is a callback of the garbage collector, which swallows what is raised
    in it.
    """
    if frame is None or not frame.f_globals.get("__name__", "").startswith("dagster_rebalance."):
        return False
    outer: FrameType | None = frame
    while outer is not None and not outer.f_globals.get("__name__", "").startswith(
        "dagster_rebalance.testing."
    ):
        outer = outer.f_back
    return outer is None


def interrupted_at(moment: int, function: Callable[[], object]) -> bool:
    """Call a function and let a signal handler raise at one of its steps.

    The steps of what the function calls count as well. Returns whether it came to that step.
    """
    steps = itertools.count()

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        # Python runs handlers when a function begins, and when it has returned; what is returned to
        # the test has left the package.
        is_possible = event == "call" or (event == "return" and is_of_the_package(frame.f_back))
        if not is_possible or not is_of_the_package(frame):
            return trace
        if next(steps) == moment:
            sys.settrace(None)
            raise PressedError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except PressedError:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_signal_handler_that_raises_at_any_step_leaves_a_consumer_that_works(
    group: FakeGroup,
) -> None:
    """A turn that is never given back would be a member that can neither poll nor leave."""
    blue = Side(group)
    moments = 0
    while interrupted_at(moments, lambda: blue.consumer.poll(0)):
        blue.consumer.commit_sync({P0: OffsetAndMetadata(1)})
        blue.consumer.poll(0)
        moments += 1
    assert moments > 50
    blue.consumer.close()
    assert not group.members


@pytest.mark.parametrize("kind", ["poll", "poll_with_rebalance"])
def test_a_signal_handler_that_raises_at_any_step_gives_nothing_away_unseen(kind: str) -> None:
    """Not even while the result is made: the caller could not delay a revoke that it never saw."""
    moment, was_interrupted = 0, True
    while was_interrupted:
        group = FakeGroup({"orders": 4})
        blue, _green = Side(group), Side(group)
        was_interrupted = interrupted_at(moment, lambda blue=blue: getattr(blue.consumer, kind)(0))  # type: ignore[misc]
        if was_interrupted:
            assert blue.consumer.poll_with_rebalance(0).to_be_revoked == {P2, P3}, moment
        assert blue.consumer.get_to_be_revoked_partitions() == {P2, P3}
        assert blue.consumer.assignment() == set(EVERYTHING)
        moment += 1
    assert moment > 50


@pytest.mark.parametrize("asks", [False, True], ids=["few records", "many records"])
def test_a_signal_handler_that_raises_at_any_step_loses_no_record_and_repeats_none(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch, *, asks: bool
) -> None:
    """Not even when partitions come and go, or are paused, in the very poll that it interrupts.

    Behind many records the fetcher asks the client for its positions.
    """
    if asks:
        monkeypatch.setattr(fetcher_module, "_RECORDS_FOR_A_POSITION", 0)
    moment, was_interrupted = 0, True
    while was_interrupted:
        log = fake_log(group, monkeypatch, {0: 7, 1: 3})
        consumer = RebalanceAwareConsumer(
            CONFIG, member=group.member(), cluster=group, clock=group.clock
        )
        consumer.subscribe(["orders"])
        read: list[Message] = []

        def some(consumer: RebalanceAwareConsumer = consumer, read: list[Message] = read) -> None:
            for _ in range(3):
                read.extend(consumer.poll(0, 2))

        was_interrupted = interrupted_at(moment, some)
        before = -1
        while before != (before := len(read)):
            read.extend(consumer.poll(0.1))
            read.extend(consumer.poll(0.1))
        assert by_partition(read) == {0: list(range(7)), 1: list(range(3))}, moment
        consumer.commit_sync()
        assert {group.committed[P0].offset, group.committed[P1].offset} == {7, 3}
        consumer.close()
        group.committed.clear()
        log.close()
        moment += 1
    assert moment > 300


def by_partition(records: list[Message]) -> dict[int, list[int]]:
    """The offsets of each partition, in the order in which they were read."""
    return {
        number: [record.offset() or 0 for record in records if record.partition() == number]
        for number in range(2)
    }


@pytest.mark.parametrize("asks", [False, True], ids=["few records", "many records"])
@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_records_that_the_client_drops_are_read_again(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch, reset: str, *, asks: bool
) -> None:
    """confluent-kafka runs signal handlers before it returns.

    If a handler raises, the client's position is past records that no caller was given.
    """
    if asks:
        monkeypatch.setattr(fetcher_module, "_RECORDS_FOR_A_POSITION", 0)
    log = fake_log(group, monkeypatch, {0: 5, 1: 5})
    consumer = RebalanceAwareConsumer(
        {**CONFIG, "auto.offset.reset": reset},
        member=group.member(),
        cluster=group,
        clock=group.clock,
    )
    consumer.subscribe(["orders"])
    consume = log.consume

    def dropped(num_messages: int, timeout: float) -> list[Message]:
        consume(num_messages, timeout)
        raise PressedError

    read: list[Message] = []
    for _ in range(4):
        log.consume = dropped  # type: ignore[method-assign]
        with pytest.raises(PressedError):
            consumer.poll(0.1, 3)
        log.consume = consume  # type: ignore[method-assign]
        read += consumer.poll(0.1, 3)
    assert by_partition(read) == {0: list(range(5)), 1: list(range(5))}
    consumer.close()


class CommitLast(RebalanceListener):
    """Sends a commit for all that goes, and notes the answer."""

    def __init__(self) -> None:
        self.answers: list[BrokerError | None] = []

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Nothing to do."""

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Commit, and do not wait."""
        offsets = dict.fromkeys(partitions, OffsetAndMetadata(7))
        consumer.commit_async(offsets, lambda _offsets, error: self.answers.append(error))


@pytest.mark.parametrize("end", ["close", "unsubscribe"])
def test_the_commit_of_the_last_callback_has_an_answer(group: FakeGroup, end: str) -> None:
    """The callback of a commit is called exactly once, also when nothing follows it."""
    blue, listener = Side(group), CommitLast()
    blue.consumer.set_rebalance_listener(listener)
    getattr(blue.consumer, end)()
    assert listener.answers == [None]
    assert group.committed == dict.fromkeys(EVERYTHING, OffsetAndMetadata(7))


def test_an_answer_that_comes_after_its_commit_was_given_up_is_ignored(group: FakeGroup) -> None:
    """Its callback was called with the time-out, and what is told behind it still counts."""
    blue = Side(group)
    answers: list[BrokerError | None] = []
    blue.consumer.commit_async(
        {P0: OffsetAndMetadata(1)}, lambda _offsets, error: answers.append(error)
    )
    blue.member.answers = False
    before = group.clock()
    blue.consumer.unsubscribe()
    assert [str(error).count("not answered in time") for error in answers] == [1]
    assert group.clock() - before == pytest.approx(10.0), "leaving has one deadline"
    blue.member.deliver(CommitAnswered(1, CommitResult(frozenset({P0}))))
    blue.member.answers = True
    blue.consumer.subscribe(["orders"])
    blue.consumer.poll(0.1)
    blue.consumer.poll(0.1)
    assert blue.consumer.assignment() == set(EVERYTHING)
    assert len(answers) == 1
