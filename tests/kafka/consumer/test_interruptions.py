"""Ctrl-C, signal handlers and exceptions of the user, at any step of a call."""

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
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.kafka.group_ports import CallbackFailed, CommitAnswered, CommitResult
from dagster_rebalance.kafka.reading import fetcher as fetcher_module
from dagster_rebalance.testing.fake_group import FakeGroup, FakeMember
from tests.kafka.consumers import (
    CONFIG,
    EVERYTHING,
    P0,
    P1,
    P2,
    P3,
    Listener,
    LossListener,
    consumer_of,
    poll,
)
from tests.kafka.fake_log import fake_log

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from confluent_kafka import Message

    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer

LOST = PartitionsLost((P0,), LostReason.FENCED)


class InterruptedMember(FakeMember):
    """A member that raises one Ctrl-C in each call that is named in `interrupted`."""

    def __init__(self, group: FakeGroup) -> None:
        super().__init__(group)
        self.interrupted: set[str] = set()
        self.answers = True
        self.clock = group.clock

    def release(self) -> None:
        self._interrupt("before the release")
        super().release()
        self._interrupt("after the release")

    def unsubscribe(self, timeout_s: float = 10.0) -> None:
        super().unsubscribe(timeout_s)
        self.clock.advance(timeout_s)

    def settle(self, timeout_s: float = 0.0) -> bool:
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
    """A consumer that owns its share, and its member."""

    def __init__(self, group: FakeGroup, **options: Any) -> None:  # noqa: ANN401 - of the consumer
        self.member = InterruptedMember(group)
        self.consumer = consumer_of(group, member=self.member, **options)
        poll(self.consumer)

    def poll_fails(self) -> None:
        """A poll raises an error of the client."""
        self.member.fail(BrokerError("a topic is gone"))
        with pytest.raises(BrokerError, match="a topic is gone"):
            self.consumer.poll(0.1)

    def refuses_metadata(self) -> None:
        """A transaction could undo a commit of the next owner."""
        with pytest.raises(
            BrokerError, match="orders-0 lost, which no poll has reported yet"
        ) as error:
            self.consumer.group_metadata()
        assert error.value.retriable


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup({"orders": 4})


@pytest.fixture
def blue(group: FakeGroup) -> Side:
    return Side(group)


def press(*_: object) -> None:
    raise KeyboardInterrupt


def interrupted_poll(side: Side) -> None:
    """A poll with Ctrl-C in its first callback."""
    side.consumer.set_rebalance_listener(Listener(press, press))
    with pytest.raises(KeyboardInterrupt):
        side.consumer.poll(0.1)
    side.consumer.set_rebalance_listener(None)


@pytest.mark.parametrize("when", ["before the release", "after the release"])
@pytest.mark.parametrize("same_poll", [False, True])
def test_interrupted_release_is_repeated_by_the_next_poll(
    group: FakeGroup, when: str, *, same_poll: bool
) -> None:
    blue = Side(group, complete_revoke_in_same_poll=same_poll)
    green = Side(group)
    blue.member.interrupted.add(when)
    if not same_poll:
        poll(blue.consumer)
    with pytest.raises(KeyboardInterrupt):
        blue.consumer.poll(0.1)
    poll(blue.consumer, green.consumer)
    assert blue.consumer.assignment() == {P0, P1}
    assert green.consumer.assignment() == {P2, P3}
    poll(blue.consumer)
    assert not blue.consumer.get_lost_partitions()


def test_events_after_an_interrupted_callback_are_applied_by_the_next_poll(
    group: FakeGroup, blue: Side
) -> None:
    blue.member.deliver(PartitionsAssigned(()))
    green = Side(group)
    interrupted_poll(blue)
    for _ in range(3):
        poll(blue.consumer, green.consumer)
    assert green.consumer.assignment()


def test_interrupted_close_leaves_the_group(group: FakeGroup, blue: Side) -> None:
    """A second `close` does nothing, so the partitions would have no reader."""
    blue.consumer.set_rebalance_listener(Listener(press, press))
    with pytest.raises(KeyboardInterrupt):
        blue.consumer.close()
    assert not group.members
    blue.consumer.close()


def test_exception_of_a_settings_callback_is_raised_once_after_the_events(
    group: FakeGroup, blue: Side
) -> None:
    blue.member.deliver(CallbackFailed(ValueError("a bug of the user's")))
    green = Side(group)
    with pytest.raises(ValueError, match="a bug of the user's"):
        blue.consumer.poll(0.1)
    assert blue.consumer.get_to_be_revoked_partitions() == {P2, P3}
    poll(blue.consumer, blue.consumer, green.consumer)
    assert green.consumer.assignment() == {P2, P3}


def test_revoke_request_of_a_failed_poll_is_reported_by_the_next_one(
    group: FakeGroup, blue: Side
) -> None:
    """A loop that logs the error and polls again could otherwise never delay the revoke."""
    green = Side(group)
    blue.poll_fails()
    before = group.clock()
    blue.consumer.poll(60)
    assert group.clock() == before, "it returns at once"
    assert blue.consumer.get_to_be_revoked_partitions() == {P2, P3}
    assert blue.consumer.delay_revoke({P2, P3})
    poll(green.consumer)
    assert not green.consumer.assignment()


def test_failed_poll_ends_no_delay(group: FakeGroup, blue: Side) -> None:
    green = Side(group)
    poll(blue.consumer)
    blue.consumer.delay_revoke({P2, P3})
    blue.poll_fails()
    poll(blue.consumer)
    assert blue.consumer.delay_revoke({P2, P3})
    poll(green.consumer)
    assert blue.consumer.assignment() == set(EVERYTHING)


def test_loss_of_a_failed_poll_is_reported_by_the_next_one(blue: Side) -> None:
    """Until then the consumer gives no identity for transactions."""
    blue.member.deliver(LOST)
    blue.poll_fails()
    blue.refuses_metadata()
    result = blue.consumer.poll_with_rebalance(0.1)
    assert result.lost == blue.consumer.get_lost_partitions() == {P0}
    assert result.events[-1] == LOST
    assert blue.consumer.group_metadata().group_id == "etl"
    assert not blue.consumer.poll_with_rebalance(0.1).events
    assert not blue.consumer.get_lost_partitions()


def test_group_metadata_is_refused_after_a_loss_and_an_interrupted_callback(blue: Side) -> None:
    blue.member.deliver(PartitionsAssigned(()))
    blue.member.deliver(LOST)
    interrupted_poll(blue)
    blue.refuses_metadata()
    poll(blue.consumer)
    assert blue.consumer.group_metadata().group_id == "etl"


def test_group_metadata_is_available_in_the_callback_of_the_last_loss(blue: Side) -> None:
    """An earlier callback of the poll is refused: it has not received the last loss."""
    answered: list[object] = []
    blue.consumer.set_rebalance_listener(
        LossListener(lambda _, consumer: answered.append(consumer.group_metadata()))
    )
    blue.member.deliver(PartitionsLost((P1,), LostReason.FENCED))
    blue.member.deliver(LOST)
    with pytest.raises(BrokerError, match="orders-0 lost, which no poll has reported yet"):
        blue.consumer.poll(0.1)
    assert len(answered) == 1


def test_events_of_an_interrupted_poll_end_with_an_unsubscribe(
    group: FakeGroup, blue: Side
) -> None:
    """Partitions of the old membership would be read beside their new owner."""
    blue.member.deliver(PartitionsAssigned((P0, P1)))
    interrupted_poll(blue)
    blue.consumer.unsubscribe()
    blue.consumer.subscribe(["orders"])
    Side(group).consumer.poll(0)
    blue.consumer.poll(0)
    assert blue.consumer.assignment() == blue.member.assignment()


def test_revoke_of_an_unsubscribe_is_an_event_of_the_next_poll(blue: Side) -> None:
    blue.consumer.unsubscribe()
    blue.consumer.subscribe(["orders"])
    events = blue.consumer.poll_with_rebalance(0.1).events
    assert events == (PartitionsRevoked(EVERYTHING), PartitionsAssigned(EVERYTHING))


def test_loss_during_a_timed_commit_refuses_further_commits_until_polled(blue: Side) -> None:
    """The partition may be assigned again, but the caller has not received the loss."""
    poll(blue.consumer)
    blue.member.deliver(LOST)
    blue.member.deliver(PartitionsAssigned((P0, P1)))
    blue.consumer.commit_offsets({P1: OffsetAndMetadata(1)}, 0.1)
    blue.refuses_metadata()
    result = blue.consumer.commit_offsets({P0: OffsetAndMetadata(1)})
    assert isinstance(result.failed[P0], PartitionLostError)
    poll(blue.consumer)
    assert blue.consumer.group_metadata().group_id == "etl"
    assert blue.consumer.commit_offsets({P0: OffsetAndMetadata(1)}).committed == {P0}


def test_commit_in_a_callback_is_refused_for_a_later_loss_of_the_same_poll(
    group: FakeGroup, blue: Side
) -> None:
    """The partition is assigned again in that poll; another owner has committed in between."""
    results: list[bool] = []

    def commit(_: object, consumer: RebalanceConsumer) -> None:
        try:
            consumer.commit_sync({P0: OffsetAndMetadata(10)})
            results.append(True)
        except PartitionLostError:
            results.append(False)

    poll(blue.consumer)
    group.committed[P0] = OffsetAndMetadata(50)
    blue.consumer.set_rebalance_listener(Listener(assigned=commit))
    blue.member.deliver(PartitionsAssigned((P1,)))
    blue.member.deliver(LOST)
    blue.member.deliver(PartitionsAssigned((P0,)))
    poll(blue.consumer)
    assert results == [False, True]


def test_records_of_an_interrupted_poll_are_returned_by_the_next_one(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit of the positions must not skip them."""
    log = fake_log(group, monkeypatch, {0: 3})
    consumer = consumer_of(group, fetch=True)
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
    """Return nothing first, so the poll waits; then records; then raise Ctrl-C."""
    answers = iter([lambda *_: [], consume])

    def interrupted(count: int, timeout_s: float) -> list[Message]:
        for answer in answers:
            return answer(count, timeout_s)
        raise KeyboardInterrupt

    return interrupted


class PressedError(Exception):
    """Raised by a signal handler."""


def is_of_the_package(frame: FrameType | None) -> bool:
    """Whether the frame is code of the package, called from the test.

    Fakes are not, and neither are callbacks of the garbage collector, which swallow exceptions.
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
    """Call a function and let a signal handler raise at one of its steps, nested calls included.

    Returns whether it came to that step.
    """
    steps = itertools.count()

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        # Python runs handlers when a function begins, and when it has returned to the package.
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


def test_signal_handler_at_any_step_leaves_a_usable_consumer(group: FakeGroup, blue: Side) -> None:
    moments = 0
    while interrupted_at(moments, lambda: blue.consumer.poll(0)):
        blue.consumer.commit_sync({P0: OffsetAndMetadata(1)})
        blue.consumer.poll(0)
        moments += 1
    assert moments > 50
    blue.consumer.close()
    assert not group.members


@pytest.mark.parametrize("kind", ["poll", "poll_with_rebalance"])
def test_signal_handler_at_any_step_completes_no_unreported_revoke(kind: str) -> None:
    """Not even while the result is created: the caller could not delay the revoke."""
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
def test_signal_handler_at_any_step_loses_and_repeats_no_record(
    monkeypatch: pytest.MonkeyPatch, *, asks: bool
) -> None:
    """After many records the fetcher asks the client for its positions."""
    if asks:
        monkeypatch.setattr(fetcher_module, "_RECORDS_FOR_A_POSITION", 0)
    moment, was_interrupted = 0, True
    while was_interrupted:
        group = FakeGroup({"orders": 4})
        fake_log(group, monkeypatch, {0: 7, 1: 3})
        consumer = consumer_of(group, fetch=True)
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

    If a handler raises, the client's position is after records that were not returned.
    """
    if asks:
        monkeypatch.setattr(fetcher_module, "_RECORDS_FOR_A_POSITION", 0)
    log = fake_log(group, monkeypatch, {})
    consumer = consumer_of(group, config={**CONFIG, "auto.offset.reset": reset}, fetch=True)
    consume = log.consume

    def dropped(num_messages: int, timeout: float) -> list[Message]:
        if group.high_watermarks([P0])[P0] == 0:
            group.produce(P0, 5)
            group.produce(P1, 5)
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


@pytest.mark.parametrize("end", ["close", "unsubscribe"])
def test_commit_of_the_last_callback_is_answered_once(
    group: FakeGroup, blue: Side, end: str
) -> None:
    answers: list[BrokerError | None] = []
    blue.consumer.set_rebalance_listener(
        Listener(
            revoked=lambda partitions, consumer: consumer.commit_async(
                dict.fromkeys(partitions, OffsetAndMetadata(7)),
                lambda _offsets, error: answers.append(error),
            )
        )
    )
    getattr(blue.consumer, end)()
    assert answers == [None]
    assert group.committed == dict.fromkeys(EVERYTHING, OffsetAndMetadata(7))


def test_answer_after_the_time_out_of_its_commit_is_ignored(group: FakeGroup, blue: Side) -> None:
    """Its callback was called with the timeout; later events still count."""
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
