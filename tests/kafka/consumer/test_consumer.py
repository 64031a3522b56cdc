"""What a user of `RebalanceAwareConsumer` sees on a fake group: lists, listener and errors."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.errors import BrokerError, IllegalStateError, PartitionLostError
from dagster_rebalance.core.model.events import (
    LostReason,
    PartitionsLost,
    PartitionsRevoked,
    RevokeRequested,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.consumer.consumer import PollResult, RebalanceAwareConsumer
from dagster_rebalance.kafka.consumer.listener import RebalanceListener
from dagster_rebalance.kafka.group_ports import OffsetAndTimestamp
from dagster_rebalance.testing.fake_group import FakeGroup, FakeMember

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer

CONFIG = {"bootstrap.servers": "nobody:9092", "group.id": "etl"}
P0, P1, P2, P3 = EVERYTHING = tuple(TopicPartition("orders", number) for number in range(4))


class Side:
    """A consumer on a fake group, with its member at hand."""

    def __init__(self, group: FakeGroup, *, same_poll: bool = False) -> None:
        self.member: FakeMember = group.member()
        self.consumer = RebalanceAwareConsumer(
            CONFIG,
            fetch=False,
            member=self.member,
            cluster=group,
            clock=group.clock,
            complete_revoke_in_same_poll=same_poll,
        )
        self.consumer.subscribe(["orders"])


@pytest.fixture
def group() -> FakeGroup:
    """A group without members, with a topic of four partitions."""
    return FakeGroup({"orders": 4})


def alone(
    group: FakeGroup, listener: RebalanceListener | None = None, *, same_poll: bool = False
) -> Side:
    """A consumer that owns all partitions."""
    blue = Side(group, same_poll=same_poll)
    blue.consumer.set_rebalance_listener(listener)
    blue.consumer.poll(0.1)
    assert blue.consumer.assignment() == set(EVERYTHING)
    return blue


def requested(
    group: FakeGroup, listener: RebalanceListener | None = None, *, same_poll: bool = False
) -> tuple[Side, Side]:
    """A consumer that has just been asked for two partitions, and the one that waits for them."""
    blue, green = alone(group, listener, same_poll=same_poll), Side(group)
    green.consumer.poll(0.1)
    blue.consumer.poll(0.1)
    return blue, green


class Diary(RebalanceListener):
    """Notes each callback, and runs something of the test's in it."""

    def __init__(
        self, during: Callable[[str, RebalanceConsumer], None] = lambda _what, _view: None
    ) -> None:
        self.lines: list[tuple[str, set[TopicPartition]]] = []
        self.during = during
        self.views: list[RebalanceConsumer] = []

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Note it."""
        self._note("assigned", partitions, consumer)

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Note it."""
        self._note("revoked", partitions, consumer)

    def _note(
        self, what: str, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        self.lines.append((what, set(partitions)))
        self.views.append(consumer)
        self.during(what, consumer)


class DiaryOfLosses(Diary):
    """Tells losses from revokes."""

    def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Note it."""
        self._note("lost", partitions, consumer)


def test_a_revoke_is_completed_at_the_start_of_the_next_poll(group: FakeGroup) -> None:
    """KIP-983; until then the partitions are assigned, and their offsets can be committed."""
    blue, green = requested(group)
    assert blue.consumer.get_to_be_revoked_partitions() == {P2, P3}
    assert blue.consumer.assignment() == set(EVERYTHING)
    blue.consumer.commit_sync({P2: OffsetAndMetadata(5)})
    blue.consumer.poll(0.1)
    green.consumer.poll(0.1)
    assert blue.consumer.assignment() == {P0, P1}
    assert green.consumer.assignment() == {P2, P3}
    assert green.consumer.committed([P2]) == {P2: OffsetAndMetadata(5)}


def test_a_delayed_revoke_gives_nothing_away(group: FakeGroup) -> None:
    """The hold lasts for as long as it is asked for, poll after poll."""
    blue, green = requested(group)
    for _ in range(5):
        assert blue.consumer.delay_revoke([P2, P3])
        assert not blue.consumer.get_to_be_revoked_partitions()
        blue.consumer.poll(0.1)
        green.consumer.poll(0.1)
        assert blue.consumer.get_to_be_revoked_partitions() == {P2, P3}
        assert not green.consumer.assignment()
    blue.consumer.poll(0.1)
    green.consumer.poll(0.1)
    assert green.consumer.assignment() == {P2, P3}


def test_a_partition_that_is_not_delayed_is_gone_for_the_api_and_reaches_the_other_with_the_last(
    group: FakeGroup,
) -> None:
    """The client releases a request as a whole; nothing may be committed for what was let go."""
    blue, green = requested(group)
    blue.consumer.delay_revoke([P3])
    blue.consumer.poll(0.1)
    green.consumer.poll(0.1)
    assert blue.consumer.assignment() == {P0, P1, P3}
    assert not green.consumer.assignment()
    result = blue.consumer.commit_offsets({P2: OffsetAndMetadata(1), P3: OffsetAndMetadata(1)})
    assert result.committed == {P3}
    assert isinstance(result.failed[P2], PartitionLostError)
    blue.consumer.poll(0.1)
    green.consumer.poll(0.1)
    assert green.consumer.assignment() == {P2, P3}


def test_poll_returns_early_on_a_request(group: FakeGroup) -> None:
    """Work on the partitions should stop at once, not when the time-out is over."""
    blue, green = alone(group), Side(group)
    green.consumer.poll(0)
    before = group.clock()
    blue.consumer.poll(60.0)
    assert blue.consumer.get_to_be_revoked_partitions() == {P2, P3}
    assert group.clock() - before < 1.0


def test_poll_takes_its_time_during_a_hold(group: FakeGroup) -> None:
    """An old request is no reason to return early again, or the loop would spin."""
    blue, _ = requested(group)
    blue.consumer.delay_revoke([P2, P3])
    before = group.clock()
    blue.consumer.poll(2.0)
    assert group.clock() - before == pytest.approx(2.0)


def test_lost_partitions_are_told_once_with_their_reason(group: FakeGroup) -> None:
    """Held and retained ones alike; a delay is denied from then on."""
    blue, _ = requested(group)
    blue.consumer.delay_revoke([P2, P3])
    group.fence(blue.member)
    told = blue.consumer.poll_with_rebalance(60.0)
    assert blue.consumer.get_lost_partitions() == set(EVERYTHING)
    assert told.events == (PartitionsLost(EVERYTHING, LostReason.FENCED),)
    assert not blue.consumer.assignment()
    assert not blue.consumer.get_to_be_revoked_partitions()
    assert not blue.consumer.delay_revoke([P2])
    assert PartitionsLost not in map(type, blue.consumer.poll_with_rebalance(0.1).events)
    assert not blue.consumer.get_lost_partitions()


def test_a_superseded_hold_is_lost_and_never_released(group: FakeGroup) -> None:
    """The stale release would give away what somebody else was granted."""
    blue, green = requested(group)
    blue.consumer.delay_revoke([P2, P3])
    group.supersede(blue.member)
    green.consumer.poll(0.1)
    assert green.consumer.assignment() == {P2, P3}
    assert blue.consumer.poll_with_rebalance(60.0).events == (
        PartitionsLost(EVERYTHING, LostReason.SUPERSEDED),
    )
    assert group.owner(P2) is green.member


def test_what_is_completed_in_the_poll_that_finds_the_loss_is_not_told_as_lost(
    group: FakeGroup,
) -> None:
    """It was given up already; each partition is told once, and nothing is released later."""
    diary = DiaryOfLosses()
    blue, _ = requested(group, diary)
    group.fence(blue.member)
    told = blue.consumer.poll_with_rebalance(60.0)
    assert diary.lines[1:] == [("revoked", {P2, P3}), ("lost", {P0, P1})]
    assert told.events == (PartitionsRevoked((P2, P3)), PartitionsLost((P0, P1), LostReason.FENCED))
    assert blue.consumer.get_lost_partitions() == {P0, P1}
    blue.consumer.poll(0.1)


def test_a_completed_partition_of_a_lost_hold_is_not_told_as_lost(group: FakeGroup) -> None:
    """It was not delayed, and so gone for the API; only its release is never sent."""
    blue, _ = requested(group)
    blue.consumer.delay_revoke([P3])
    blue.consumer.poll(0.1)
    blue.consumer.delay_revoke([P3])
    group.fence(blue.member)
    blue.consumer.poll(60.0)
    assert blue.consumer.get_lost_partitions() == {P0, P1, P3}
    blue.consumer.poll(0.1)


def test_a_hold_that_is_never_released_is_lost(group: FakeGroup) -> None:
    """It is not possible to delay a revoke for ever."""
    blue, _ = requested(group)
    for _ in range(100):
        if not blue.consumer.delay_revoke([P2, P3]):
            break
        blue.consumer.poll(5.0)
    assert not blue.consumer.delay_revoke([P2, P3])
    assert group.clock() < 80


def test_the_old_behaviour_can_be_restored(group: FakeGroup) -> None:
    """KIP-983: "a configuration could be introduced that restores the current behavior"."""
    diary = Diary()
    blue, green = requested(group, diary, same_poll=True)
    assert not blue.consumer.get_to_be_revoked_partitions()
    assert blue.consumer.assignment() == {P0, P1}
    assert diary.lines[-1] == ("revoked", {P2, P3})
    green.consumer.poll(0.1)
    assert green.consumer.assignment() == {P2, P3}


def test_a_loop_without_the_new_methods_works_as_ever(group: FakeGroup) -> None:
    """Existing users need no changes."""
    blue, green = Side(group), Side(group)
    for _ in range(4):
        blue.consumer.poll(0.1)
        green.consumer.poll(0.1)
    assert {len(blue.consumer.assignment()), len(green.consumer.assignment())} == {2}


def test_one_poll_may_tell_everything_at_once(group: FakeGroup) -> None:
    """KIP-983, variant 1: one poll may tell everything.

    It tells the records, what the next poll will revoke, and what was just lost.
    """
    blue, green = alone(group), Side(group)
    green.consumer.poll(0)
    asked = (RevokeRequested((P2, P3)),)
    assert blue.consumer.poll_with_rebalance(60.0) == PollResult(
        [], frozenset({P2, P3}), lost=frozenset(), events=asked
    )
    blue.consumer.delay_revoke([P2, P3])
    group.fence(blue.member)
    lost = (PartitionsLost(EVERYTHING, LostReason.FENCED),)
    assert blue.consumer.poll_with_rebalance(60.0) == PollResult(
        [], frozenset(), lost=frozenset(EVERYTHING), events=lost
    )


def test_the_separate_poll_completes_in_the_next_poll_also_where_poll_does_not(
    group: FakeGroup,
) -> None:
    """The setting for `poll` does not change the separate poll.

    KIP-983, variant 1: "it is possible to keep partition revoke behavior of the current poll method
    exactly the same".
    """
    blue, green = alone(group, same_poll=True), Side(group)
    green.consumer.poll(0)
    assert blue.consumer.poll_with_rebalance(60.0).to_be_revoked == {P2, P3}
    assert blue.consumer.assignment() == set(EVERYTHING)
    blue.consumer.poll(0.1)
    assert blue.consumer.assignment() == {P0, P1}


def test_the_listener_is_told_of_a_revoke_when_it_is_completed(group: FakeGroup) -> None:
    """While the partitions are still in the assignment: it is the last chance to commit."""
    seen: list[tuple[str, set[TopicPartition]]] = []

    def commit(what: str, view: RebalanceConsumer) -> None:
        seen.append((what, set(view.assignment())))
        if what == "revoked":
            view.commit_sync({P2: OffsetAndMetadata(9)})

    diary = Diary(commit)
    blue, _ = requested(group, diary)
    assert diary.lines == [("assigned", set(EVERYTHING))]
    blue.consumer.delay_revoke([P2, P3])
    blue.consumer.poll(0.1)
    assert len(diary.lines) == 1
    blue.consumer.poll(0.1)
    assert diary.lines[1:] == [("revoked", {P2, P3})]
    assert seen == [("assigned", set(EVERYTHING)), ("revoked", set(EVERYTHING))]
    assert group.committed[P2] == OffsetAndMetadata(9)


def test_lost_partitions_are_not_in_the_assignment_of_their_callback(group: FakeGroup) -> None:
    """KAFKA-20385: the consumer has removed them before the callback, and had no others."""
    seen: list[frozenset[TopicPartition]] = []
    diary = DiaryOfLosses(lambda _, view: seen.append(view.assignment()))
    blue = alone(group, diary)
    group.fence(blue.member)
    blue.consumer.poll(1.0)
    assert diary.lines[1:] == [("lost", set(EVERYTHING))]
    assert seen[1:] == [frozenset()]


def test_a_loss_is_a_revoke_for_a_listener_that_does_not_tell_them_apart(group: FakeGroup) -> None:
    """KAFKA-20385: the default of `on_partitions_lost`."""
    diary = Diary()
    blue = alone(group, diary)
    group.fence(blue.member)
    blue.consumer.poll(1.0)
    assert diary.lines[1:] == [("revoked", set(EVERYTHING))]


def test_a_listener_takes_effect_with_the_next_poll_and_the_last_one_wins(group: FakeGroup) -> None:
    """KAFKA-20385: also over the one given to `subscribe`; None removes."""
    first, second, third = Diary(), Diary(), Diary()
    blue = Side(group)
    with pytest.warns(DeprecationWarning, match="set_rebalance_listener"):
        blue.consumer.subscribe(["orders"], first)
    blue.consumer.set_rebalance_listener(second)
    blue.consumer.poll(0.1)
    assert (first.lines, second.lines) == ([], [("assigned", set(EVERYTHING))])
    blue.consumer.set_rebalance_listener(third)
    blue.consumer.set_rebalance_listener(None)
    group.fence(blue.member)
    blue.consumer.poll(1.0)
    assert (len(second.lines), third.lines) == (1, [])


def test_the_view_is_dead_after_its_callback(group: FakeGroup) -> None:
    """KAFKA-20385: whoever stores it and uses it later gets an IllegalStateError."""
    diary = Diary()
    alone(group, diary)
    (view,) = diary.views
    with pytest.raises(IllegalStateError, match="ended with its callback"):
        view.assignment()


def test_an_exception_of_a_listener_reaches_the_caller_once_and_the_rebalance_completes(
    group: FakeGroup,
) -> None:
    """KAFKA-20385: the other callbacks still fire, and the consumer stays usable."""

    def fail(what: str, _view: RebalanceConsumer) -> None:
        if what == "revoked":
            msg = "a bug of the user's"
            raise ValueError(msg)

    diary = Diary(fail)
    blue, green = requested(group, diary)
    with pytest.raises(ValueError, match="bug of the user"):
        blue.consumer.poll(0.1)
    green.consumer.poll(0.1)
    assert blue.consumer.assignment() == {P0, P1}
    assert green.consumer.assignment() == {P2, P3}
    blue.consumer.poll(0.1)
    green.consumer.close()
    blue.consumer.poll(0.1)
    assert diary.lines[-1] == ("assigned", {P2, P3})


@pytest.mark.parametrize("call", ["poll", "close", "unsubscribe"])
def test_a_nested_call_inside_a_callback_is_refused(group: FakeGroup, call: str) -> None:
    """The client cannot poll within its own poll; the state stays as it was."""
    refused: list[str] = []
    blue = Side(group)

    def nest(_what: str, _view: RebalanceConsumer) -> None:
        try:
            blue.consumer.poll(0) if call == "poll" else getattr(blue.consumer, call)()
        except IllegalStateError as error:
            refused.append(str(error))

    blue.consumer.set_rebalance_listener(Diary(nest))
    blue.consumer.poll(0.1)
    assert len(refused) == 1
    assert "inside a rebalance callback" in refused[0]
    assert blue.consumer.assignment() == set(EVERYTHING)


def test_two_threads_may_not_poll_at_a_time(group: FakeGroup) -> None:
    """A consumer has one owner; it refuses the second thread and does not disturb the first."""
    refused: list[str] = []
    blue = Side(group)

    def other_thread(_what: str, _view: RebalanceConsumer) -> None:
        def poll() -> None:
            try:
                blue.consumer.poll(0)
            except IllegalStateError as error:
                refused.append(str(error))

        thread = threading.Thread(target=poll)
        thread.start()
        thread.join()

    blue.consumer.set_rebalance_listener(Diary(other_thread))
    blue.consumer.poll(0.1)
    assert len(refused) == 1
    assert "another thread" in refused[0]


def test_an_error_of_the_client_is_raised_once_after_what_else_happened(group: FakeGroup) -> None:
    """An event of the same poll must not be swallowed by it."""
    blue = Side(group)
    blue.member.fail(BrokerError("refused credentials"))
    with pytest.raises(BrokerError, match="refused credentials"):
        blue.consumer.poll(0.1)
    assert blue.consumer.assignment() == set(EVERYTHING)
    blue.consumer.poll(0.1)


def test_closing_tells_the_listener_and_hands_everything_over(group: FakeGroup) -> None:
    """A last commit works in `on_partitions_revoked`, and held partitions go with the rest."""
    diary = Diary(
        lambda what, view: (
            view.commit_sync({P0: OffsetAndMetadata(4)}) if what == "revoked" else None
        )
    )
    blue, green = requested(group, diary)
    blue.consumer.delay_revoke([P2, P3])
    blue.consumer.close()
    blue.consumer.close()
    assert diary.lines[1:] == [("revoked", set(EVERYTHING))]
    assert group.committed == {P0: OffsetAndMetadata(4)}
    green.consumer.poll(0.1)
    assert green.consumer.assignment() == set(EVERYTHING)
    with pytest.raises(IllegalStateError, match="closed"):
        blue.consumer.poll(0)


def test_an_exception_while_closing_does_not_keep_the_consumer_in_the_group(
    group: FakeGroup,
) -> None:
    """A group must not wait for the session time-out of a consumer whose listener has a bug."""

    def fail(what: str, _view: RebalanceConsumer) -> None:
        if what == "revoked":
            msg = "a bug of the user's"
            raise ValueError(msg)

    blue = alone(group, Diary(fail))
    with pytest.raises(ValueError, match="bug of the user"):
        blue.consumer.close()
    assert not group.members


def test_unsubscribing_gives_everything_up_and_allows_to_come_back(group: FakeGroup) -> None:
    """The listener hears of it as of a revoke."""
    diary = Diary()
    blue = alone(group, diary)
    blue.consumer.unsubscribe()
    assert not blue.consumer.assignment()
    assert not group.members
    blue.consumer.subscribe(["orders"])
    blue.consumer.poll(0.1)
    assert [what for what, _ in diary.lines] == ["assigned", "revoked", "assigned"]


def test_subscribing_to_nothing_is_unsubscribing(group: FakeGroup) -> None:
    """As in Kafka's own consumer."""
    blue = alone(group)
    blue.consumer.subscribe([])
    assert not blue.consumer.assignment()
    assert not group.members


def test_a_listener_given_to_subscribe_is_called(group: FakeGroup) -> None:
    """A listener given to `subscribe` is deprecated and still valid.

    The newer listener overrides the earlier one, in whichever way each was given.
    """
    earlier, diary = Diary(), Diary()
    blue = Side(group)
    blue.consumer.set_rebalance_listener(earlier)
    with pytest.warns(DeprecationWarning, match="deprecated"):
        blue.consumer.subscribe(["orders"], diary)
    blue.consumer.poll(0.1)
    assert diary.lines == [("assigned", set(EVERYTHING))]
    assert not earlier.lines


def test_what_is_no_listener_is_refused_and_the_one_before_stays(group: FakeGroup) -> None:
    """A bug of the caller's leaves the state as it was."""
    diary = Diary()
    blue = Side(group)
    blue.consumer.set_rebalance_listener(diary)
    with pytest.raises(IllegalStateError, match="no rebalance listener"):
        blue.consumer.set_rebalance_listener(print)  # type: ignore[arg-type]
    blue.consumer.poll(0.1)
    assert diary.lines


def test_a_failed_commit_raises_what_matters_most_and_names_every_partition(
    group: FakeGroup,
) -> None:
    """A lost partition must not hide behind one whose commit can be tried again.

    The consumer commits what can be committed.
    """
    blue = alone(group)
    with pytest.raises(PartitionLostError) as caught:
        blue.consumer.commit_sync(
            {
                P0: OffsetAndMetadata(1),
                P1: OffsetAndMetadata(1, "x" * 5000),
                TopicPartition("orders", 9): OffsetAndMetadata(1),
            }
        )
    assert set(caught.value.partitions) == {P1, TopicPartition("orders", 9)}
    assert group.committed == {P0: OffsetAndMetadata(1)}


def test_without_a_fetcher_the_position_is_where_reading_would_start(group: FakeGroup) -> None:
    """The committed offset, else what `auto.offset.reset` says; a seek has nothing to move."""
    group.produce(P0, 10)
    group.committed[P1] = OffsetAndMetadata(3)
    blue = alone(group)
    assert blue.consumer.position(P0) == 10
    assert blue.consumer.position(P1) == 3
    with pytest.raises(IllegalStateError, match="without a fetcher"):
        blue.consumer.seek(P0, 1)


def test_questions_about_offsets_need_no_assignment(group: FakeGroup) -> None:
    """All partitions in one request, whoever owns them."""
    group.produce(P0, 2, timestamp=100)
    group.produce(P0, 3, timestamp=200)
    group.delete_before(P0, 1)
    consumer = Side(group).consumer
    assert consumer.beginning_offsets([P0, P1]) == {P0: 1, P1: 0}
    assert consumer.end_offsets([P0, P1]) == {P0: 5, P1: 0}
    found = consumer.offsets_for_times({P0: 150, P1: 150})
    assert found[P1] is None
    assert found[P0] == OffsetAndTimestamp(2, 200)
    assert [info.partition for info in consumer.partitions_for("orders")] == [0, 1, 2, 3]
    assert list(consumer.list_topics()) == ["orders"]


def test_the_check_names_a_subscribed_topic_that_does_not_exist(group: FakeGroup) -> None:
    """At the start, not as a silent wait."""
    blue = Side(group)
    blue.consumer.check()
    blue.consumer.subscribe(["orders", "oders"])
    with pytest.raises(BrokerError, match="oders does not exist"):
        blue.consumer.check()


def test_assigned_and_revoked_in_one_poll_are_told_in_their_order(group: FakeGroup) -> None:
    """The newly assigned ones may be among those to be revoked at once."""
    diary = Diary()
    blue = alone(group, diary)
    group.add_partitions("orders", 8)
    green = Side(group)
    green.consumer.poll(0.1)
    blue.consumer.poll(0.1)
    new = {TopicPartition("orders", number) for number in range(4, 8)}
    assert blue.consumer.get_to_be_revoked_partitions() == new
    assert blue.consumer.assignment() == {*EVERYTHING, *new}
    blue.consumer.poll(0.1)
    assert diary.lines[1:] == [("assigned", new), ("revoked", new)]
    assert blue.consumer.assignment() == set(EVERYTHING)


def test_a_commit_is_waited_for_no_longer_than_its_caller_wants() -> None:
    """It may yet be stored, and is stored before a later one of the same member."""
    group = FakeGroup({"orders": 1})
    consumer = RebalanceAwareConsumer(
        CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )
    consumer.subscribe(["orders"])
    consumer.poll(0)
    group.answers_commits = False
    result = consumer.commit_offsets({P0: OffsetAndMetadata(1)}, 0.5)
    assert not result.committed
    assert result.failed[P0].retriable
    assert "may yet be stored" in str(result.failed[P0])
    with pytest.raises(BrokerError, match="may yet be stored"):
        consumer.commit_sync({P0: OffsetAndMetadata(2)}, 0.5)
    group.answers_commits = True
    consumer.commit_sync({P0: OffsetAndMetadata(3)})
    assert group.committed[P0] == OffsetAndMetadata(3)
