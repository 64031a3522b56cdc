"""Iteration reads ahead, and each record counts as read when it is returned."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.events import LostReason, PartitionsLost, RevokeRequested
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.kafka.aio.async_consumer import AsyncRebalanceAwareConsumer
from dagster_rebalance.testing.fake_group import FakeGroup, FakeMember
from tests.kafka.consumer.test_interruptions import by_partition, interrupted_at
from tests.kafka.consumers import CONFIG, EVERYTHING, P0, P1, P2, P3, consumer_of, member_of
from tests.kafka.fake_log import FakeLog, fake_log
from tests.kafka.readers import CommitOnRevoke

if TYPE_CHECKING:
    from confluent_kafka import Message

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer

EACH = 40
WHOLE = {tp: list(range(EACH)) for tp in EVERYTHING}
SEVERAL = 20
"""After so many records, an iteration reads ahead."""


class Counted(FakeMember):
    """A member that counts its polls."""

    polls = 0

    def poll(self, timeout_s: float) -> Any:  # noqa: ANN401 - events
        self.polls += 1
        return super().poll(timeout_s)


class Iteration:
    """An iterating consumer, and the offsets that it returned."""

    def __init__(self, group: FakeGroup, monkeypatch: pytest.MonkeyPatch, each: int = EACH) -> None:
        self.group = group
        self.log: FakeLog = fake_log(group, monkeypatch, dict.fromkeys(range(4), each))
        self.member = Counted(group)
        self.consumer = consumer_of(group, member=self.member, fetch=True)
        self.read: dict[TopicPartition, list[int]] = {tp: [] for tp in EVERYTHING}

    def take(self, count: int) -> None:
        for _ in range(count):
            record = next(self.consumer)
            tp = next(tp for tp in EVERYTHING if tp.partition == record.partition())
            self.read[tp].append(record.offset() or 0)

    def ahead_of(self, partition: TopicPartition) -> int:
        """How many records of a partition are read ahead."""
        left = self.consumer.ahead.left
        return sum(record.partition() == partition.partition for record in left)

    def read_ahead(self, *partitions: TopicPartition) -> None:
        """Take records until some of these partitions are read ahead, and nothing else is due."""
        while not all(map(self.ahead_of, partitions)):
            self.take(1)

    def rest(self) -> None:
        """Read the rest with polls."""
        while records := self.consumer.poll(0):
            for record in records:
                tp = next(tp for tp in EVERYTHING if tp.partition == record.partition())
                self.read[tp].append(record.offset() or 0)


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup({"orders": 4})


@pytest.fixture
def blue(group: FakeGroup, monkeypatch: pytest.MonkeyPatch) -> Iteration:
    made = Iteration(group, monkeypatch)
    made.log.interleaves = True
    return made


def test_iteration_polls_the_member_and_the_client_less_than_once_a_record(blue: Iteration) -> None:
    blue.take(EACH * 4)
    assert blue.read == WHOLE
    assert blue.member.polls < 5
    assert len(blue.log.waits) < 15


def test_slow_body_polls_the_member_for_each_record(blue: Iteration) -> None:
    """The member leaves the group if it is not polled."""
    blue.read_ahead(P0)
    before = blue.member.polls
    for _ in range(5):
        blue.group.clock.advance(1.0)
        blue.take(1)
    assert blue.member.polls == before + 5


def test_fast_polls_with_records_omit_the_member(blue: Iteration) -> None:
    blue.consumer.poll(0, 1)
    blue.consumer.poll(0, 1)
    before = blue.member.polls
    for _ in range(5):
        assert blue.consumer.poll(0, 1)
    assert blue.member.polls == before
    consumer_of(blue.group).poll(0)
    blue.consumer.poll(0, 1)
    assert blue.consumer.get_to_be_revoked_partitions() == {P2, P3}


def test_revoke_between_two_records_drops_those_that_were_read_ahead(blue: Iteration) -> None:
    blue.take(SEVERAL)
    blue.read_ahead(P1, P2, P3)
    green = consumer_of(blue.group)
    green.poll(0)
    before = {tp: list(blue.read[tp]) for tp in (P2, P3)}
    blue.take(1)
    assert blue.consumer.get_to_be_revoked_partitions() == {P2, P3}
    for _ in range(5):
        assert blue.consumer.delay_revoke({P2, P3})
        blue.take(1)
    assert {tp: blue.read[tp] for tp in (P2, P3)} == before
    assert blue.consumer.assignment() == set(EVERYTHING)
    blue.consumer.commit_sync()
    blue.take(1)
    assert blue.consumer.assignment() == {P0, P1}
    green.poll(0)
    assert green.assignment() == {P2, P3}
    assert {tp: blue.group.committed[tp].offset for tp in (P2, P3)} == {
        tp: len(before[tp]) for tp in (P2, P3)
    }
    blue.rest()
    assert blue.read[P0] == blue.read[P1] == list(range(EACH))


def test_revoke_completes_in_the_next_record_unless_delayed(blue: Iteration) -> None:
    blue.take(SEVERAL)
    blue.consumer.set_rebalance_listener(CommitOnRevoke())
    blue.read_ahead(P2, P3)
    consumer_of(blue.group).poll(0)
    blue.take(1)
    assert blue.consumer.assignment() == set(EVERYTHING)
    blue.take(1)
    assert blue.consumer.assignment() == {P0, P1}
    committed = {tp: blue.group.committed[tp].offset for tp in (P2, P3)}
    assert committed == {tp: len(blue.read[tp]) for tp in (P2, P3)}


def test_lost_partition_returns_no_record_that_was_read_ahead(blue: Iteration) -> None:
    blue.read_ahead(P2)
    before = list(blue.read[P2])
    blue.member.deliver(PartitionsLost((P2,), LostReason.FENCED))
    blue.take(1)
    assert blue.consumer.get_lost_partitions() == {P2}
    blue.take(1)
    assert not blue.consumer.get_lost_partitions()
    blue.rest()
    assert blue.read[P2] == before
    assert blue.read[P0] == list(range(EACH))


def test_pause_between_two_records_drops_them_until_the_resume(blue: Iteration) -> None:
    blue.read_ahead(P0, P1)
    before = list(blue.read[P1])
    blue.consumer.pause([P1])
    assert blue.consumer.position(P1) == len(before)
    blue.take(SEVERAL)
    assert blue.read[P1] == before
    assert blue.consumer.position(P1) == len(before)
    blue.consumer.resume([P1])
    blue.rest()
    assert blue.read == WHOLE


def test_seek_between_two_records_drops_those_of_the_partition(blue: Iteration) -> None:
    blue.read_ahead(P0, P1)
    before = list(blue.read[P1])
    blue.consumer.seek(P1, 30)
    assert blue.consumer.position(P1) == 30
    blue.rest()
    assert blue.read[P1] == [*before, *range(30, EACH)]
    assert blue.read[P0] == list(range(EACH))


def test_close_between_two_records_commits_returned_ones_only(blue: Iteration) -> None:
    blue.consumer.set_rebalance_listener(CommitOnRevoke())
    blue.read_ahead(P0, P1, P2, P3)
    blue.consumer.close()
    committed = {tp: offset.offset for tp, offset in blue.group.committed.items()}
    assert committed == {tp: len(read) for tp, read in blue.read.items() if read}
    with pytest.raises(IllegalStateError, match="poll on a closed consumer"):
        next(blue.consumer)


def test_unsubscribe_between_two_records_ends_them(blue: Iteration) -> None:
    blue.read_ahead(P0)
    blue.consumer.unsubscribe()
    blue.consumer.wakeup()
    assert list(blue.consumer) == []


def test_wakeup_between_two_records_ends_the_iteration_and_loses_none(blue: Iteration) -> None:
    blue.read_ahead(P0)
    blue.consumer.wakeup()
    with pytest.raises(StopIteration):
        next(blue.consumer)
    blue.rest()
    assert blue.read == WHOLE


def test_iteration_after_a_failed_body_continues_with_the_next_record(blue: Iteration) -> None:
    def fail_at(count: int) -> None:
        for number, _ in enumerate(blue.consumer, 1):
            if number == count:
                raise OSError

    for count in (SEVERAL, 7):
        with pytest.raises(OSError, match=r"^$"):
            fail_at(count)
    for _, _record in zip(range(5), blue.consumer, strict=False):
        pass
    positions = [blue.consumer.position(tp) for tp in EVERYTHING]
    assert sum(positions) == SEVERAL + 7 + 5
    assert len(blue.consumer.poll(0)) + sum(positions) <= 4 * EACH


def test_commit_in_the_background_during_an_iteration_is_answered(blue: Iteration) -> None:
    answers: list[object] = []
    blue.read_ahead(P0)
    blue.consumer.commit_async(callback=lambda _, error: answers.append(error))
    blue.take(1)
    assert answers == [None]


def test_event_that_a_commit_with_a_time_out_has_read_is_handled_by_the_next_record(
    blue: Iteration,
) -> None:
    blue.read_ahead(P0)
    blue.member.deliver(RevokeRequested((P3,)))
    blue.consumer.commit_offsets({P0: OffsetAndMetadata(1)}, 0.01)
    blue.take(1)
    assert blue.consumer.get_to_be_revoked_partitions() == {P3}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 30)),
        st.tuples(st.just("poll"), st.integers(1, 30)),
        st.tuples(st.just("pause"), st.integers(0, 3)),
        st.tuples(st.just("resume"), st.integers(0, 3)),
        st.tuples(st.just("seek"), st.integers(0, 3)),
        st.tuples(st.just("commit"), st.just(0)),
        st.tuples(st.just("wait"), st.just(0)),
        st.tuples(st.just("join"), st.just(0)),
        st.tuples(st.just("leave"), st.just(0)),
    ),
    max_size=30,
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS, st.booleans())
def test_position_and_commit_follow_the_returned_records(  # noqa: C901, PLR0915 - nested steps
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[str, int]],
    interleaves: bool,  # noqa: FBT001
) -> None:
    """Each record of a partition is at its position, whatever happens between two records."""
    group = FakeGroup({"orders": 4})
    log = fake_log(group, monkeypatch, dict.fromkeys(range(4), 300))
    log.interleaves = interleaves
    consumer = consumer_of(group, fetch=True)
    expected = dict.fromkeys(EVERYTHING, 0)
    consumer.set_rebalance_listener(CommitOnRevoke())
    other: list[RebalanceAwareConsumer] = []

    def check(record: Message) -> None:
        tp = EVERYTHING[record.partition() or 0]
        assert tp in consumer.assignment()
        assert tp not in consumer.paused()
        assert record.offset() == expected[tp]
        expected[tp] += 1

    def change(member: RebalanceAwareConsumer | None) -> None:
        """Add or remove the other member, and complete the rebalance."""
        for _ in range(3):
            for record in consumer.poll(0, 1):
                check(record)
            if member is not None:
                member.poll(0)

    def play(what: str, number: int) -> None:
        match what:
            case "take" if sum(300 - expected[tp] for tp in consumer.assignment()) > number:
                consumer.resume(EVERYTHING)
                for _ in range(number):
                    check(next(consumer))
            case "poll":
                for record in consumer.poll(0, number):
                    check(record)
            case "pause":
                consumer.pause([EVERYTHING[number]])
            case "resume":
                consumer.resume([EVERYTHING[number]])
            case "seek" if EVERYTHING[number] in consumer.assignment():
                expected[EVERYTHING[number]] = max(0, expected[EVERYTHING[number]] - 7)
                consumer.seek(EVERYTHING[number], expected[EVERYTHING[number]])
            case _:
                play_group(what)

    def play_group(what: str) -> None:
        match what:
            case "wait":
                group.clock.advance(1.0)
            case "join" if not other:
                other.append(consumer_of(group))
                change(other[0])
            case "leave" if other:
                other.pop().close()
                change(None)
            case "commit":
                consumer.commit_sync()
            case _:
                pass

    fetcher = consumer._state.fetcher
    assert fetcher is not None
    for what, number in steps:
        play(what, number)
        for tp in consumer.assignment():
            position = fetcher.position(tp)
            assert position.offset in {None, expected[tp]}
            if what == "commit" and position.offset is not None and position.is_read:
                assert group.committed[tp].offset == expected[tp]
    consumer.close()


def test_signal_handler_at_any_step_of_an_iteration_loses_and_repeats_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moment, was_interrupted = 0, True
    while was_interrupted:
        group = FakeGroup({"orders": 4})
        fake_log(group, monkeypatch, {0: 9, 1: 4})
        consumer = consumer_of(group, fetch=True)
        read: list[Message] = []

        def some(consumer: RebalanceAwareConsumer = consumer, read: list[Message] = read) -> None:
            for record in consumer:
                read.append(record)
                if len(read) == 8:
                    return

        was_interrupted = interrupted_at(moment, some)
        before = -1
        while before != (before := len(read)):
            read.extend(consumer.poll(0.1))
            read.extend(consumer.poll(0.1))
        assert by_partition(read) == {0: list(range(9)), 1: list(range(4))}, moment
        consumer.commit_sync()
        assert {group.committed[P0].offset, group.committed[P1].offset} == {9, 4}
        consumer.close()
        moment += 1
    assert moment > 300


@pytest.fixture
def asynchronous(group: FakeGroup, monkeypatch: pytest.MonkeyPatch) -> AsyncRebalanceAwareConsumer:
    log = fake_log(group, monkeypatch, dict.fromkeys(range(4), EACH))
    log.interleaves = True
    return AsyncRebalanceAwareConsumer(
        CONFIG, member=Counted(group), cluster=group, clock=group.clock
    )


def test_asyncio_iteration_reads_ahead_and_drops_at_a_revoke(
    group: FakeGroup, asynchronous: AsyncRebalanceAwareConsumer
) -> None:
    async def use() -> None:
        read: dict[int, list[int]] = {number: [] for number in range(4)}
        consumer = asynchronous
        async with consumer:
            await consumer.subscribe(["orders"])
            green, last = None, [0]
            async for record in consumer:
                read[record.partition() or 0].append(record.offset() or 0)
                left = consumer._consumer.ahead.left
                if green is None and any(one.partition() == 3 for one in left):
                    green = consumer_of(group)
                    green.poll(0)
                    last = [len(read[number]) for number in (2, 3)]
                await consumer.delay_revoke(await consumer.get_to_be_revoked_partitions())
                if len(read[0]) == len(read[1]) == EACH:
                    break
            assert [len(read[number]) for number in (2, 3)] == last
            assert [await consumer.position(tp) for tp in (P2, P3)] == last
        assert all(offsets == list(range(len(offsets))) for offsets in read.values())

    asyncio.run(asyncio.wait_for(use(), 20))


def test_asyncio_iteration_waits_for_the_thread_less_than_once_a_record(
    asynchronous: AsyncRebalanceAwareConsumer,
) -> None:
    async def use() -> None:
        jobs, read = 0, 0
        async with asynchronous as consumer:
            await consumer.subscribe(["orders"])
            submit = consumer._owner.submit

            def counted(*given: Any, **more: Any) -> Any:  # noqa: ANN401 - of the thread
                nonlocal jobs
                jobs += 1
                return submit(*given, **more)

            consumer._owner.submit = counted  # type: ignore[method-assign]
            async for _ in consumer:
                read += 1
                if read == 4 * EACH:
                    break
            assert jobs < 15

    asyncio.run(asyncio.wait_for(use(), 20))


def test_asyncio_iterations_of_several_tasks_return_each_record_once(
    asynchronous: AsyncRebalanceAwareConsumer,
) -> None:
    async def use() -> None:
        read: list[tuple[int | None, int | None]] = []
        async with asynchronous as consumer:
            await consumer.subscribe(["orders"])

            async def iterate() -> None:
                async for record in consumer:
                    read.append((record.partition(), record.offset()))
                    if len(read) % 3 == 0:
                        await asyncio.sleep(0)
                    if len(read) % 7 == 0:
                        await consumer.position(P0)
                    if len(read) == 4 * EACH:
                        for task in tasks:
                            task.cancel()

            tasks = [asyncio.create_task(iterate()) for _ in range(3)]
            await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(read) == [
            (tp.partition, offset) for tp in EVERYTHING for offset in range(EACH)
        ]

    asyncio.run(asyncio.wait_for(use(), 20))


def test_members_of_the_fake_group_have_news_until_polled(group: FakeGroup) -> None:
    consumer = consumer_of(group)
    member = member_of(consumer)
    assert member.has_news, "it joins"
    consumer.poll(0)
    assert not member.has_news
    consumer.commit_async({P0: OffsetAndMetadata(1)})
    assert member.has_news
    consumer.poll(0)
    group.fence(member)
    assert member.has_news
