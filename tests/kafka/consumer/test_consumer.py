"""Revoke lists, listeners and errors of `RebalanceAwareConsumer` on a fake group."""

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
from dagster_rebalance.kafka.consumer.consumer import PollResult
from dagster_rebalance.kafka.group_ports import OffsetAndTimestamp
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.kafka.consumers import (
    EVERYTHING,
    LATEST,
    P0,
    P1,
    P2,
    P3,
    Listener,
    LossListener,
    bug,
    consumer_of,
    member_of,
    owner,
    poll,
    revoke_requested,
)

if TYPE_CHECKING:
    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup({"orders": 4})


def test_revoke_is_completed_at_the_start_of_the_next_poll(group: FakeGroup) -> None:
    """KIP-983; until then the partitions are assigned, and their offsets can be committed."""
    blue, green = revoke_requested(group)
    assert blue.get_to_be_revoked_partitions() == {P2, P3}
    assert blue.assignment() == set(EVERYTHING)
    blue.commit_sync({P2: OffsetAndMetadata(5)})
    poll(blue, green)
    assert blue.assignment() == {P0, P1}
    assert green.assignment() == {P2, P3}
    assert green.committed([P2]) == {P2: OffsetAndMetadata(5)}


def test_delayed_revoke_releases_nothing(group: FakeGroup) -> None:
    blue, green = revoke_requested(group)
    for _ in range(5):
        assert blue.delay_revoke([P2, P3])
        assert not blue.get_to_be_revoked_partitions()
        poll(blue, green)
        assert blue.get_to_be_revoked_partitions() == {P2, P3}
        assert not green.assignment()
    poll(blue, green)
    assert green.assignment() == {P2, P3}


def test_completed_partition_is_released_with_the_last_of_its_request(group: FakeGroup) -> None:
    """The client releases a request as a whole; commits for completed partitions are refused."""
    blue, green = revoke_requested(group)
    blue.delay_revoke([P3])
    poll(blue, green)
    assert blue.assignment() == {P0, P1, P3}
    assert not green.assignment()
    result = blue.commit_offsets({P2: OffsetAndMetadata(1), P3: OffsetAndMetadata(1)})
    assert result.committed == {P3}
    assert isinstance(result.failed[P2], PartitionLostError)
    poll(blue, green)
    assert green.assignment() == {P2, P3}


def test_poll_returns_early_on_a_request_and_waits_during_the_hold(group: FakeGroup) -> None:
    blue, green = owner(group), consumer_of(group)
    green.poll(0)
    before = group.clock()
    blue.poll(60.0)
    assert blue.get_to_be_revoked_partitions() == {P2, P3}
    assert group.clock() - before < 1.0
    blue.delay_revoke([P2, P3])
    before = group.clock()
    blue.poll(2.0)
    assert group.clock() - before == pytest.approx(2.0)


def test_loss_is_reported_by_one_poll_and_denies_delays(group: FakeGroup) -> None:
    blue, _ = revoke_requested(group)
    blue.delay_revoke([P2, P3])
    group.fence(member_of(blue))
    result = blue.poll_with_rebalance(60.0)
    assert blue.get_lost_partitions() == set(EVERYTHING)
    assert result.events == (PartitionsLost(EVERYTHING, LostReason.FENCED),)
    assert not blue.assignment()
    assert not blue.get_to_be_revoked_partitions()
    assert not blue.delay_revoke([P2])
    assert PartitionsLost not in map(type, blue.poll_with_rebalance(0.1).events)
    assert not blue.get_lost_partitions()


def test_superseded_hold_is_lost_and_never_released(group: FakeGroup) -> None:
    """A late release would revoke the assignment of the new owner."""
    blue, green = revoke_requested(group)
    blue.delay_revoke([P2, P3])
    group.supersede(member_of(blue))
    poll(green)
    assert green.assignment() == {P2, P3}
    assert blue.poll_with_rebalance(60.0).events == (
        PartitionsLost(EVERYTHING, LostReason.SUPERSEDED),
    )
    assert group.owner(P2) is member_of(green)


def test_partition_completed_by_the_poll_that_detects_the_loss_is_revoked(group: FakeGroup) -> None:
    listener = LossListener()
    blue, _ = revoke_requested(group, listener)
    group.fence(member_of(blue))
    result = blue.poll_with_rebalance(60.0)
    assert listener.calls[1:] == [("revoked", {P2, P3}), ("lost", {P0, P1})]
    assert result.events == (
        PartitionsRevoked((P2, P3)),
        PartitionsLost((P0, P1), LostReason.FENCED),
    )
    assert blue.get_lost_partitions() == {P0, P1}
    poll(blue)


def test_completed_partition_of_a_lost_hold_is_not_lost(group: FakeGroup) -> None:
    blue, _ = revoke_requested(group)
    blue.delay_revoke([P3])
    poll(blue)
    blue.delay_revoke([P3])
    group.fence(member_of(blue))
    blue.poll(60.0)
    assert blue.get_lost_partitions() == {P0, P1, P3}
    poll(blue)


def test_hold_that_is_never_released_is_lost(group: FakeGroup) -> None:
    blue, _ = revoke_requested(group)
    for _ in range(100):
        if not blue.delay_revoke([P2, P3]):
            break
        blue.poll(5.0)
    assert not blue.delay_revoke([P2, P3])
    assert group.clock() < 80


def test_complete_revoke_in_same_poll_restores_the_old_behaviour(group: FakeGroup) -> None:
    """KIP-983: "a configuration could be introduced that restores the current behavior"."""
    listener = Listener()
    blue, green = revoke_requested(group, listener, complete_revoke_in_same_poll=True)
    assert not blue.get_to_be_revoked_partitions()
    assert blue.assignment() == {P0, P1}
    assert listener.calls[-1] == ("revoked", {P2, P3})
    poll(green)
    assert green.assignment() == {P2, P3}


def test_loop_without_the_new_methods_needs_no_change(group: FakeGroup) -> None:
    blue, green = consumer_of(group), consumer_of(group)
    for _ in range(4):
        poll(blue, green)
    assert {len(blue.assignment()), len(green.assignment())} == {2}


def test_poll_with_rebalance_returns_requests_and_losses(group: FakeGroup) -> None:
    """KIP-983, variant 1."""
    blue, green = owner(group), consumer_of(group)
    green.poll(0)
    requested = (RevokeRequested((P2, P3)),)
    assert blue.poll_with_rebalance(60.0) == PollResult(
        [], frozenset({P2, P3}), lost=frozenset(), events=requested
    )
    blue.delay_revoke([P2, P3])
    group.fence(member_of(blue))
    lost = (PartitionsLost(EVERYTHING, LostReason.FENCED),)
    assert blue.poll_with_rebalance(60.0) == PollResult(
        [], frozenset(), lost=frozenset(EVERYTHING), events=lost
    )


def test_poll_with_rebalance_completes_in_the_next_poll_with_any_setting(group: FakeGroup) -> None:
    """KIP-983, variant 1: "it is possible to keep ... the current poll method exactly the same"."""
    blue, green = owner(group, complete_revoke_in_same_poll=True), consumer_of(group)
    green.poll(0)
    assert blue.poll_with_rebalance(60.0).to_be_revoked == {P2, P3}
    assert blue.assignment() == set(EVERYTHING)
    poll(blue)
    assert blue.assignment() == {P0, P1}


def test_revoke_callback_runs_at_completion_and_may_commit(group: FakeGroup) -> None:
    assignments: list[frozenset[TopicPartition]] = []

    def commit(_: object, consumer: RebalanceConsumer) -> None:
        assignments.append(consumer.assignment())
        consumer.commit_sync({P2: OffsetAndMetadata(9)})

    listener = Listener(revoked=commit)
    blue, _ = revoke_requested(group, listener)
    blue.delay_revoke([P2, P3])
    poll(blue)
    assert listener.calls == [("assigned", set(EVERYTHING))]
    poll(blue)
    assert listener.calls[1:] == [("revoked", {P2, P3})]
    assert assignments == [set(EVERYTHING)]
    assert group.committed[P2] == OffsetAndMetadata(9)


def test_lost_partitions_are_not_in_the_assignment_of_their_callback(group: FakeGroup) -> None:
    """KAFKA-20385: the consumer has removed them before the callback, and had no others."""
    assignments: list[frozenset[TopicPartition]] = []
    listener = LossListener(lambda _, consumer: assignments.append(consumer.assignment()))
    blue = owner(group, listener)
    group.fence(member_of(blue))
    poll(blue)
    assert listener.calls[1:] == [("lost", set(EVERYTHING))]
    assert assignments == [frozenset()]


def test_loss_calls_on_partitions_revoked_by_default(group: FakeGroup) -> None:
    """KAFKA-20385: the default of `on_partitions_lost`."""
    listener = Listener()
    blue = owner(group, listener)
    group.fence(member_of(blue))
    poll(blue)
    assert listener.calls[1:] == [("revoked", set(EVERYTHING))]


def test_last_listener_takes_effect_with_the_next_poll(group: FakeGroup) -> None:
    """KAFKA-20385: also over the one given to `subscribe`; None removes."""
    first, second, third, fourth = (Listener() for _ in range(4))
    blue = consumer_of(group)
    with pytest.warns(DeprecationWarning, match="set_rebalance_listener"):
        blue.subscribe(["orders"], first)
    blue.set_rebalance_listener(second)
    poll(blue)
    assert (first.calls, second.calls) == ([], [("assigned", set(EVERYTHING))])
    blue.set_rebalance_listener(third)
    blue.set_rebalance_listener(None)
    group.fence(member_of(blue))
    poll(blue)
    assert (len(second.calls), third.calls) == (1, [])
    blue.set_rebalance_listener(third)
    with pytest.warns(DeprecationWarning, match="deprecated"):
        blue.subscribe(["orders"], fourth)
    poll(blue)
    assert (third.calls, fourth.calls) == ([], [("assigned", set(EVERYTHING))])


def test_exception_of_a_listener_reaches_the_caller_once(group: FakeGroup) -> None:
    """KAFKA-20385: the rebalance completes, and the other callbacks are still called."""
    listener = Listener(revoked=bug)
    blue, green = revoke_requested(group, listener)
    with pytest.raises(ValueError, match="bug of the user"):
        blue.poll(0.1)
    poll(green)
    assert blue.assignment() == {P0, P1}
    assert green.assignment() == {P2, P3}
    poll(blue)
    green.close()
    poll(blue)
    assert listener.calls[-1] == ("assigned", {P2, P3})


@pytest.mark.parametrize("call", ["poll", "close", "unsubscribe"])
def test_nested_call_in_a_callback_is_refused(group: FakeGroup, call: str) -> None:
    refused: list[str] = []
    blue = consumer_of(group)

    def nest(*_: object) -> None:
        with pytest.raises(IllegalStateError) as caught:
            getattr(blue, call)()
        refused.append(str(caught.value))

    blue.set_rebalance_listener(Listener(assigned=nest))
    poll(blue)
    assert refused == [f"{call} inside a rebalance callback: return from the callback first"]
    assert blue.assignment() == set(EVERYTHING)


def test_poll_of_a_second_thread_is_refused(group: FakeGroup) -> None:
    refused: list[str] = []
    blue = consumer_of(group)

    def poll_elsewhere() -> None:
        with pytest.raises(IllegalStateError) as caught:
            blue.poll(0)
        refused.append(str(caught.value))

    def start_thread(*_: object) -> None:
        thread = threading.Thread(target=poll_elsewhere)
        thread.start()
        thread.join()

    blue.set_rebalance_listener(Listener(assigned=start_thread))
    poll(blue)
    assert len(refused) == 1
    assert "another thread" in refused[0]


def test_client_error_is_raised_once_after_the_events_of_its_poll(group: FakeGroup) -> None:
    blue = consumer_of(group)
    member_of(blue).fail(BrokerError("refused credentials"))
    with pytest.raises(BrokerError, match="refused credentials"):
        blue.poll(0.1)
    assert blue.assignment() == set(EVERYTHING)
    poll(blue)


def test_close_calls_the_listener_and_revokes_all_partitions(group: FakeGroup) -> None:
    """A last commit works in `on_partitions_revoked`; held partitions are revoked with the rest."""
    listener = Listener(
        revoked=lambda _, consumer: consumer.commit_sync({P0: OffsetAndMetadata(4)})
    )
    blue, green = revoke_requested(group, listener)
    blue.delay_revoke([P2, P3])
    blue.close()
    blue.close()
    assert listener.calls[1:] == [("revoked", set(EVERYTHING))]
    assert group.committed == {P0: OffsetAndMetadata(4)}
    poll(green)
    assert green.assignment() == set(EVERYTHING)
    with pytest.raises(IllegalStateError, match="closed"):
        blue.poll(0)


def test_close_leaves_the_group_although_the_listener_fails(group: FakeGroup) -> None:
    blue = owner(group, Listener(revoked=bug))
    with pytest.raises(ValueError, match="bug of the user"):
        blue.close()
    assert not group.members


def test_unsubscribe_revokes_all_partitions_and_subscribe_rejoins(group: FakeGroup) -> None:
    listener = Listener()
    blue = owner(group, listener)
    blue.unsubscribe()
    assert not blue.assignment()
    assert not group.members
    blue.subscribe(["orders"])
    poll(blue)
    assert [callback for callback, _ in listener.calls] == ["assigned", "revoked", "assigned"]
    blue.subscribe([])
    assert not blue.assignment()
    assert not group.members


def test_refused_listener_leaves_the_one_before(group: FakeGroup) -> None:
    listener = Listener()
    blue = consumer_of(group)
    blue.set_rebalance_listener(listener)
    with pytest.raises(IllegalStateError, match="not a rebalance listener"):
        blue.set_rebalance_listener(print)  # type: ignore[arg-type]
    poll(blue)
    assert listener.calls


def test_failed_commit_raises_the_worst_error_with_every_partition(group: FakeGroup) -> None:
    """A lost partition must not hide behind a retriable error; the others are committed."""
    blue, foreign = owner(group), TopicPartition("orders", 9)
    with pytest.raises(PartitionLostError) as caught:
        blue.commit_sync(
            {
                P0: OffsetAndMetadata(1),
                P1: OffsetAndMetadata(1, "x" * 5000),
                foreign: OffsetAndMetadata(1),
            }
        )
    assert set(caught.value.partitions) == {P1, foreign}
    assert group.committed == {P0: OffsetAndMetadata(1)}


def test_position_without_a_fetcher_is_where_reading_would_start(group: FakeGroup) -> None:
    group.produce(P0, 10)
    group.committed[P1] = OffsetAndMetadata(3)
    blue = owner(group, config=LATEST)
    assert blue.position(P0) == 10
    assert blue.position(P1) == 3
    with pytest.raises(IllegalStateError, match="without a fetcher"):
        blue.seek(P0, 1)


def test_offset_queries_need_no_assignment(group: FakeGroup) -> None:
    group.produce(P0, 2, timestamp=100)
    group.produce(P0, 3, timestamp=200)
    group.delete_before(P0, 1)
    consumer = consumer_of(group)
    assert consumer.beginning_offsets([P0, P1]) == {P0: 1, P1: 0}
    assert consumer.end_offsets([P0, P1]) == {P0: 5, P1: 0}
    found = consumer.offsets_for_times({P0: 150, P1: 150})
    assert found == {P0: OffsetAndTimestamp(2, 200), P1: None}
    assert [info.partition for info in consumer.partitions_for("orders")] == [0, 1, 2, 3]
    assert list(consumer.list_topics()) == ["orders"]


def test_check_names_a_missing_topic_of_the_subscription(group: FakeGroup) -> None:
    blue = consumer_of(group)
    blue.check()
    blue.subscribe(["orders", "oders"])
    with pytest.raises(BrokerError, match="oders does not exist"):
        blue.check()


def test_assignment_and_revoke_request_of_one_poll_keep_their_order(group: FakeGroup) -> None:
    listener = Listener()
    blue = owner(group, listener)
    group.add_partitions("orders", 8)
    poll(consumer_of(group), blue)
    new = {TopicPartition("orders", number) for number in range(4, 8)}
    assert blue.get_to_be_revoked_partitions() == new
    assert blue.assignment() == {*EVERYTHING, *new}
    poll(blue)
    assert listener.calls[1:] == [("assigned", new), ("revoked", new)]
    assert blue.assignment() == set(EVERYTHING)


def test_commit_without_an_answer_fails_at_its_time_out(group: FakeGroup) -> None:
    """It may still be stored, but before a later commit of the same member."""
    consumer = owner(group)
    group.answers_commits = False
    result = consumer.commit_offsets({P0: OffsetAndMetadata(1)}, 0.5)
    assert not result.committed
    assert result.failed[P0].retriable
    assert "may still be stored" in str(result.failed[P0])
    with pytest.raises(BrokerError, match="may still be stored"):
        consumer.commit_sync({P0: OffsetAndMetadata(2)}, 0.5)
    group.answers_commits = True
    consumer.commit_sync({P0: OffsetAndMetadata(3)})
    assert group.committed[P0] == OffsetAndMetadata(3)
