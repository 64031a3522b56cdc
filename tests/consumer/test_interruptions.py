"""Ctrl-C, and exceptions of the user's, at moments when something is owed to the group or to the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.consumer.events import CallbackFailed, CommitAnswered, CommitResult, PartitionsAssigned
from dagster_rebalance.consumer.listener import RebalanceListener
from dagster_rebalance.consumer.rebalance_aware import RebalanceAwareConsumer
from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition
from dagster_rebalance.testing.fake_group import FakeGroup, FakeMember

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.consumer.view import RebalanceConsumer
    from dagster_rebalance.core.errors import BrokerError

CONFIG = {"bootstrap.servers": "nobody:9092", "group.id": "etl"}
P0, P1, P2, P3 = EVERYTHING = tuple(TopicPartition("orders", number) for number in range(4))


class InterruptedMember(FakeMember):
    """A member that somebody presses Ctrl-C in, once for each call that is named in `interrupted`."""

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
def test_a_release_that_was_interrupted_is_made_up_for(group: FakeGroup, when: str, *, same_poll: bool) -> None:
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

    def on_partitions_assigned(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
        """Press it."""
        self._press(partitions, consumer)

    def on_partitions_revoked(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
        """Press it."""
        self._press(partitions, consumer)

    def _press(self, *_: object) -> None:
        raise KeyboardInterrupt


def test_what_was_told_behind_an_interrupted_callback_is_carried_out_by_the_next_poll(group: FakeGroup) -> None:
    """A revoke request that nobody heard of would never be answered."""
    blue = Side(group)
    blue.consumer.set_rebalance_listener(Interrupted())
    blue.member.told(PartitionsAssigned(()))
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
    blue.member.told(CallbackFailed(problem))
    green = Side(group)
    with pytest.raises(ValueError, match="a bug of the user's"):
        blue.consumer.poll(0.1)
    assert blue.consumer.get_to_be_revoked_partitions() == {P2, P3}
    blue.consumer.poll(0.1)
    green.consumer.poll(0.1)
    assert green.consumer.assignment() == {P2, P3}


class CommitLast(RebalanceListener):
    """Sends a commit for all that goes, and notes the answer."""

    def __init__(self) -> None:
        self.answers: list[BrokerError | None] = []

    def on_partitions_assigned(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
        """Nothing to do."""

    def on_partitions_revoked(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
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
    blue.consumer.commit_async({P0: OffsetAndMetadata(1)}, lambda _offsets, error: answers.append(error))
    blue.member.answers = False
    before = group.clock()
    blue.consumer.unsubscribe()
    assert [str(error).count("not answered in time") for error in answers] == [1]
    assert group.clock() - before == pytest.approx(10.0), "leaving has one deadline"
    blue.member.told(CommitAnswered(1, CommitResult(frozenset({P0}))))
    blue.member.answers = True
    blue.consumer.subscribe(["orders"])
    blue.consumer.poll(0.1)
    blue.consumer.poll(0.1)
    assert blue.consumer.assignment() == set(EVERYTHING)
    assert len(answers) == 1
