"""Contract of commits: each partition has its own result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model import commit_requests
from dagster_rebalance.core.model.errors import BrokerError, PartitionLostError
from dagster_rebalance.core.model.events import PartitionsLost, RevokeRequested
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.group_ports import CommitAnswered
from tests.kafka.contract.stages import Actor, Stage, pass_time, play

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from dagster_rebalance.kafka.group_ports import CommitResult

    NewActor = Callable[[], Actor]


def partitions_of(*topics: str) -> frozenset[TopicPartition]:
    """The partitions of topics with four partitions each."""
    return frozenset(TopicPartition(topic, number) for topic in topics for number in range(4))


def owner_of(actor: NewActor, *topics: str) -> Actor:
    """A member that owns the partitions of these topics; the first is the stage's."""
    owner = actor().subscribe(*topics[1:])
    play(lambda: owner.owns == partitions_of(*topics), owner, what="the whole assignment")
    return owner


def stored(owner: Actor, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """The committed offsets of the partitions that have one."""
    found = owner.member.committed(partitions, 60.0)
    return {tp: offset.offset for tp, offset in found.items() if offset}


def answers(owner: Actor) -> Mapping[int, CommitResult]:
    """The results of `commit_async` by ticket."""
    return {
        event.ticket: event.result for event in owner.events if isinstance(event, CommitAnswered)
    }


def test_refused_partition_fails_alone(stage: Stage, actor: NewActor) -> None:
    owner = owner_of(actor, stage.topic)
    first, second, *others = sorted(owner.owns)
    wanted = dict.fromkeys(others, OffsetAndMetadata(3))
    wanted[first] = OffsetAndMetadata(3, "x" * 4_095)
    wanted[second] = OffsetAndMetadata(3, "x" * 4_096)
    result = owner.member.commit(wanted)
    assert result.committed == {first, *others}
    assert result.failed.keys() == {second}
    assert "4,095 characters" in str(result.failed[second])
    assert result.failed[second].partitions.keys() == {second}
    assert not result.failed[second].retriable
    assert stored(owner, owner.owns) == dict.fromkeys([first, *others], 3)


def test_metadata_above_the_request_size_is_refused_for_its_partition(
    stage: Stage, actor: NewActor
) -> None:
    """The broker would close the connection, and store no partition of the request."""
    owner = owner_of(actor, stage.topic)
    first, *others = sorted(owner.owns)
    result = owner.member.commit(
        {first: OffsetAndMetadata(3, "x" * 32_767), **dict.fromkeys(others, OffsetAndMetadata(3))}
    )
    assert result.committed == frozenset(others)
    assert "32,767 bytes" in str(result.failed[first])
    assert stored(owner, owner.owns) == dict.fromkeys(others, 3)


def test_offsets_of_several_requests_are_all_stored(
    stage: Stage, actor: NewActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker stores a request as one batch of at most 1 MB."""
    monkeypatch.setattr(commit_requests, "MAX_REQUEST_BYTES", 9_000)
    owner = owner_of(actor, stage.topic)
    result = owner.member.commit(dict.fromkeys(owner.owns, OffsetAndMetadata(3, "x" * 4_000)))
    assert result.committed == owner.owns
    assert stored(owner, owner.owns) == dict.fromkeys(owner.owns, 3)


def test_refused_commit_does_not_fail_a_joined_commit(stage: Stage, actor: NewActor) -> None:
    owner = owner_of(actor, stage.topic)
    first, second, *_ = sorted(owner.owns)
    tickets = [
        owner.member.commit_async({first: OffsetAndMetadata(1)}),
        owner.member.commit_async({second: OffsetAndMetadata(2, "x" * 4_096)}),
        owner.member.commit_async({first: OffsetAndMetadata(2)}),
    ]
    play(lambda: len(answers(owner)) == len(tickets), owner, what="the answers")
    assert [bool(answers(owner)[ticket].failed) for ticket in tickets] == [False, True, False]
    assert stored(owner, owner.owns) == {first: 2}


@pytest.mark.parametrize("in_hold", [False, True])
def test_commits_of_other_topics_succeed_while_a_topic_is_deleted(
    stage: Stage, actor: NewActor, *, in_hold: bool
) -> None:
    gone = stage.add_topic()
    owner = owner_of(actor, stage.topic, gone)
    assert not owner.member.commit(dict.fromkeys(owner.owns, OffsetAndMetadata(1))).failed
    others = [owner]
    if in_hold:
        others.append(actor().subscribe(gone))
        play(lambda: owner.member.held, *others, what="a revoke request")
    stage.delete_topic(gone)
    result = owner.member.commit(
        dict.fromkeys(partitions_of(stage.topic, gone), OffsetAndMetadata(2))
    )
    assert result.committed == partitions_of(stage.topic)
    assert result.failed.keys() == partitions_of(gone)
    assert stored(owner, partitions_of(stage.topic)) == dict.fromkeys(partitions_of(stage.topic), 2)


@pytest.fixture
def _soon_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a topic count as deleted after a second."""
    monkeypatch.setattr(commit_requests, "GONE_AFTER_S", 1.0)


@pytest.mark.usefixtures("_soon_gone")
@pytest.mark.parametrize("made_again", [False, True])
def test_topic_deleted_during_a_hold_does_not_end_it(
    stage: Stage, actor: NewActor, *, made_again: bool
) -> None:
    gone = stage.add_topic()
    owner = owner_of(actor, stage.topic, gone)
    owner.member.commit(dict.fromkeys(owner.owns, OffsetAndMetadata(1)))
    other = actor().subscribe(gone)
    play(lambda: owner.member.held, owner, other, what="a revoke request")
    stage.delete_topic(gone)
    if made_again:
        stage.add_topic(gone)
    pass_time(owner, other, polls=20)
    assert not owner.partitions_of(PartitionsLost)
    assert partitions_of(stage.topic) <= owner.owns
    assert set(owner.partitions_of(RevokeRequested)) >= owner.member.held
    assert not owner.member.commit(
        dict.fromkeys(partitions_of(stage.topic), OffsetAndMetadata(3))
    ).failed


def test_probe_detects_fencing_after_a_topic_was_deleted(stage: Stage, actor: NewActor) -> None:
    """The broker checks the member only in a commit for an existing topic."""
    gone = stage.add_topic()
    owner = owner_of(actor, stage.topic, gone)
    other = actor().subscribe(gone)
    play(lambda: owner.member.held, owner, other, what="a revoke request")
    stage.delete_topic(gone)
    pass_time(owner, other, polls=10)
    stage.evict(owner.member)
    play(lambda: owner.partitions_of(PartitionsLost), owner, other, what="the loss")
    assert partitions_of(stage.topic) <= set(owner.partitions_of(PartitionsLost))


@pytest.mark.usefixtures("_soon_gone")
def test_commits_of_a_deleted_topic_fail_with_partition_lost(stage: Stage, actor: NewActor) -> None:
    gone = stage.add_topic()
    owner = owner_of(actor, stage.topic, gone)
    other = actor().subscribe(gone)
    play(lambda: owner.member.held, owner, other, what="a revoke request")
    stage.delete_topic(gone)
    errors: list[BrokerError] = []

    def is_lost() -> bool:
        result = owner.member.commit(dict.fromkeys(owner.owns, OffsetAndMetadata(1)))
        assert partitions_of(stage.topic) <= result.committed
        errors[:] = result.failed.values()
        return any(isinstance(error, PartitionLostError) for error in errors)

    play(is_lost, owner, other, what="the partitions to count as lost")
    assert "deleted" in str(errors[0])
