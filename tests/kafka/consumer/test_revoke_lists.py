"""The lists of KIP-983: its sentences one by one, and a model of its text."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.kafka.consumer.revoke_lists import DueRevokes, RevokeLists

A, B, C = (TopicPartition("orders", number) for number in range(3))
NOTHING = frozenset[TopicPartition]()


def lists_of(*partitions: TopicPartition) -> RevokeLists:
    lists = RevokeLists()
    lists.assign(partitions)
    return lists


def test_requested_revoke_is_completed_in_the_next_poll() -> None:
    """KIP-983: "the revoke will be completed in the next poll"."""
    lists = lists_of(A, B, C)
    lists.start_poll()
    lists.request({A, B})
    assert lists.to_be_revoked == {A, B}
    assert lists.start_poll() == DueRevokes(completed=frozenset({A, B}), release=frozenset({A, B}))
    assert lists.to_be_revoked == NOTHING


def test_delay_lasts_for_one_poll() -> None:
    """KIP-983: "delayed to the poll following the next poll"."""
    lists = lists_of(A, B, C)
    lists.request({A})
    assert lists.delay({A})
    assert lists.to_be_revoked == NOTHING
    assert lists.delayed == {A}
    assert lists.start_poll() == DueRevokes(NOTHING, NOTHING)
    assert lists.to_be_revoked == {A}
    assert lists.start_poll().completed == {A}


def test_revoke_can_be_delayed_poll_after_poll() -> None:
    lists = lists_of(A, B, C)
    lists.request({A})
    for _ in range(10):
        assert lists.delay({A})
        assert lists.start_poll().completed == NOTHING
        assert lists.to_be_revoked == {A}


def test_completed_partitions_are_released_with_the_last_one() -> None:
    """Librdkafka ends a whole revoke request with the first unassign."""
    lists = lists_of(A, B, C)
    lists.request({A, B, C})
    lists.delay({B, C})
    assert lists.start_poll() == DueRevokes(completed=frozenset({A}), release=NOTHING)
    lists.delay({C})
    assert lists.start_poll() == DueRevokes(completed=frozenset({A, B}), release=NOTHING)
    assert lists.unreleased == {A, B, C}
    assert lists.start_poll() == DueRevokes(frozenset({A, B, C}), frozenset({A, B, C}))
    lists.released()
    assert lists.unreleased == NOTHING


def test_interrupted_release_is_due_again_in_the_next_poll() -> None:
    lists = RevokeLists()
    lists.request({A, B})
    due = DueRevokes(completed=frozenset({A, B}), release=frozenset({A, B}))
    assert [lists.start_poll(), lists.start_poll()] == [due, due]
    lists.released()
    assert lists.start_poll() == DueRevokes(NOTHING, NOTHING)


def test_request_during_a_release_is_not_released_with_it() -> None:
    lists = RevokeLists()
    lists.request({A})
    assert lists.start_poll().release == {A}
    lists.request({B})
    lists.released()
    assert lists.unreleased == {B}


def test_lost_partition_moves_to_the_lost_list_for_one_poll() -> None:
    """KIP-983: "removed from the revoke-next and revoke-thereafter lists"."""
    lists = lists_of(A, B, C)
    lists.request({A, B})
    lists.delay({B})
    lists.lose({A, B, C})
    assert lists.to_be_revoked == lists.delayed == NOTHING
    assert lists.lost == {A, B, C}
    assert lists.start_poll() == DueRevokes(NOTHING, NOTHING)
    assert lists.lost == NOTHING


def test_delay_of_a_lost_partition_is_denied_and_delays_the_others() -> None:
    """KIP-983: "returns true on success, false when some of these partitions were lost"."""
    lists = lists_of(A, B, C)
    lists.request({A, B})
    lists.lose({B})
    assert not lists.delay({A, B})
    assert lists.delayed == {A}
    assert lists.delay({A})


def test_delay_is_denied_until_the_lost_partition_is_assigned_again() -> None:
    """KIP-983: "once the partition is lost, the delay request is denied"."""
    lists = lists_of(A, B, C)
    lists.lose({A})
    lists.start_poll()
    lists.start_poll()
    assert not lists.delay({A})
    lists.assign({A})
    lists.request({A})
    assert lists.delay({A})


def test_delay_of_a_partition_without_a_request_changes_nothing() -> None:
    lists = lists_of(A, B, C)
    lists.request({A})
    assert lists.delay({B, C})
    assert lists.delay([])
    assert lists.to_be_revoked == {A}
    assert lists.delayed == NOTHING


def test_late_delay_is_denied_until_the_partition_is_assigned_again() -> None:
    """KIP-983: the request for a delay "returns true on success"."""
    lists = lists_of(A, B)
    lists.request({A})
    lists.start_poll()
    assert not lists.delay({A})
    assert lists.delay({B})
    assert not lists.delay({C})
    lists.assign({A, C})
    assert lists.delay({A, C})


def test_delay_is_denied_if_revokes_are_completed_in_the_same_poll() -> None:
    lists = lists_of(A, B)
    lists.request({A})
    lists.complete()
    assert not lists.delay({A})
    assert lists.delay({B})


def test_second_request_joins_the_first_one() -> None:
    """Librdkafka makes no second request during a hold."""
    lists = lists_of(A, B, C)
    lists.request({A})
    lists.delay({A})
    lists.request({A, B})
    assert lists.to_be_revoked == {B}
    assert lists.delayed == {A}
    assert lists.start_poll() == DueRevokes(completed=frozenset({B}), release=NOTHING)
    assert lists.start_poll() == DueRevokes(completed=frozenset({A, B}), release=frozenset({A, B}))


def test_completed_partition_is_not_lost_with_its_hold() -> None:
    lists = lists_of(A, B, C)
    lists.request({A, B})
    lists.delay({B})
    lists.start_poll()
    lists.lose({A, B, C})
    assert lists.lost == {B, C}
    assert lists.start_poll().release == NOTHING


def test_undelivered_poll_keeps_the_lists_for_one_more_poll() -> None:
    """The caller could not ask for a delay."""
    lists = lists_of(A, B, C)
    lists.request({A, B})
    lists.delay({B})
    lists.lose({C})
    lists.mark_undelivered()
    assert lists.start_poll() == DueRevokes(NOTHING, NOTHING, has_undelivered=True)
    assert lists.to_be_revoked == {A, B}
    assert lists.lost == {C}
    assert lists.start_poll() == DueRevokes(frozenset({A, B}), frozenset({A, B}))
    assert lists.lost == NOTHING


def test_undelivered_poll_without_events_has_no_undelivered_result() -> None:
    lists = lists_of(A)
    lists.mark_undelivered()
    assert lists.start_poll() == DueRevokes(NOTHING, NOTHING)


class ListsOfTheKip(RuleBasedStateMachine):
    """Compares the lists with the seven sentences of "Proposed changes"."""

    partitions = st.sets(st.sampled_from([A, B, C, TopicPartition("other", 0)]))

    def __init__(self) -> None:
        super().__init__()
        self.real = RevokeLists()
        self.revoke_next: set[TopicPartition] = set()
        self.revoke_thereafter: set[TopicPartition] = set()
        self.lost: set[TopicPartition] = set()
        self.assigned: set[TopicPartition] = set()
        self.not_released: set[TopicPartition] = set()

    @rule()
    def poll_starts(self) -> None:
        """At the start of poll: complete, empty, move."""
        self.revoke_next.clear()
        self.lost.clear()
        self.revoke_next, self.revoke_thereafter = self.revoke_thereafter, set()
        completed = self.not_released - self.revoke_next
        self.assigned -= completed
        released = set() if self.revoke_next else set(self.not_released)
        assert self.real.start_poll() == DueRevokes(frozenset(completed), frozenset(released))
        if released:
            self.real.released()
        self.not_released -= released

    @rule(partitions=partitions)
    def revoke_is_requested(self, partitions: set[TopicPartition]) -> None:
        """The revoked partitions are added to the revoke-next list."""
        if self.not_released:
            return  # librdkafka asks for one revoke at a time
        self.real.request(partitions)
        self.revoke_next |= partitions
        self.not_released |= partitions

    @rule(partitions=partitions)
    def partitions_are_lost(self, partitions: set[TopicPartition]) -> None:
        """Removed from both lists, added to the lost ones."""
        partitions -= self.not_released - self.revoke_next - self.revoke_thereafter
        self.real.lose(partitions)
        self.revoke_next -= partitions
        self.revoke_thereafter -= partitions
        self.not_released -= partitions
        self.lost |= partitions
        self.assigned -= partitions

    @rule(partitions=partitions)
    def partitions_are_assigned(self, partitions: set[TopicPartition]) -> None:
        self.real.assign(partitions)
        self.assigned |= partitions

    @rule(partitions=partitions)
    def delay_is_requested(self, partitions: set[TopicPartition]) -> None:
        """Moves the given partitions from the one list to the other."""
        moved = partitions & self.revoke_next
        self.revoke_next -= moved
        self.revoke_thereafter |= moved
        assert self.real.delay(partitions) == (partitions <= self.assigned)

    @invariant()
    def the_lists_agree(self) -> None:
        assert self.real.to_be_revoked == self.revoke_next
        assert self.real.delayed == self.revoke_thereafter
        assert self.real.lost == self.lost
        assert self.real.unreleased == self.not_released

    @invariant()
    def a_partition_is_on_one_list(self) -> None:
        assert not self.real.to_be_revoked & self.real.delayed


TestListsOfTheKip = ListsOfTheKip.TestCase
