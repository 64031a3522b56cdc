"""Commits: what is sent when, and what an answer means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import confluent_kafka
import pytest
from confluent_kafka import KafkaError

from dagster_rebalance.consumer import commits as commits_module
from dagster_rebalance.consumer.events import CommitAnswered, CommitResult
from dagster_rebalance.core.errors import PartitionLostError, RebalanceInProgressError
from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition
from tests.consumer.clients import ScriptedMember

if TYPE_CHECKING:
    from collections.abc import Iterator

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


def offset(number: int) -> OffsetAndMetadata:
    """An offset without metadata."""
    return OffsetAndMetadata(number)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedMember]:
    """A member that owns two partitions."""
    made = ScriptedMember(monkeypatch)
    made.grant(P0, P1)
    made.poll()
    yield made
    made.close()


def results(scene: ScriptedMember) -> dict[int, CommitResult]:
    """What was told, by ticket."""
    return {event.ticket: event.result for event in scene.told if isinstance(event, CommitAnswered)}


def asked(scene: ScriptedMember) -> list[list[tuple[int, int]]]:
    """The requests, without metadata."""
    return [[(partition, at) for partition, at, _ in request] for request in scene.client.asked]


def test_what_is_asked_for_meanwhile_goes_out_as_one_request(scene: ScriptedMember) -> None:
    """In order, and without a request for each record that somebody commits."""
    scene.client.may_answer.clear()
    scene.member.commit_async({P0: offset(1)})
    scene.until(lambda: scene.client.asked, "the first request")
    for number in range(2, 5):
        scene.member.commit_async({P0: offset(number)})
    scene.member.commit_async({P1: offset(9)})
    assert not scene.member.settle(0)
    scene.client.may_answer.set()
    assert scene.member.settle(5)
    scene.told += scene.poll()
    assert asked(scene) == [[(0, 1)], [(0, 4), (1, 9)]]
    assert list(results(scene)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("refusals", "attempts"), [(2, 3), (9, 6)])
def test_a_commit_waits_for_an_epoch_that_is_on_its_way(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch, refusals: int, attempts: int
) -> None:
    """Without the wait, a leaving member's last commit fails if another has just left.

    Its records would then be processed twice.
    """
    monkeypatch.setattr(commits_module, "_EPOCH_PAUSES_S", (0.0,) * 5)
    scene.client.answers = [KafkaError.STALE_MEMBER_EPOCH] * refusals
    result = scene.member.commit({P0: offset(1)})
    scene.client.answers = []
    assert asked(scene) == [[(0, 1)]] * attempts
    assert [type(error) for error in result.failed.values()] == (
        [] if refusals < attempts else [RebalanceInProgressError]
    )
    assert scene.session.ended is None


@pytest.mark.parametrize("code", [KafkaError.STALE_MEMBER_EPOCH, KafkaError.FENCED_MEMBER_EPOCH])
def test_no_newer_epoch_is_waited_for_where_none_can_come(scene: ScriptedMember, code: int) -> None:
    """In a hold a stale epoch is final, and so is a refusal of the member itself at any time."""
    if code == KafkaError.STALE_MEMBER_EPOCH:
        scene.client.stored = KafkaError._TIMED_OUT  # no probe
        scene.ask_for(P1)
    scene.client.answers = [code] * 9
    assert isinstance(scene.member.commit({P0: offset(1)}).failed[P0], PartitionLostError)
    assert len(scene.client.asked) == 1


def test_a_commit_that_waits_for_a_lost_partition_is_never_sent(scene: ScriptedMember) -> None:
    """Not even when the partition comes back: it was meant for the earlier ownership."""
    scene.client.may_answer.clear()
    scene.member.commit_async({P0: offset(1)})
    scene.until(lambda: scene.client.asked, "the first request")
    theirs = [confluent_kafka.TopicPartition(P0.topic, P0.partition)]

    def lose_and_come_back() -> None:
        scene.session._on_lost(scene.client, theirs)
        scene.client.incremental_unassign(theirs)
        scene.session._on_assign(scene.client, theirs)

    scene.client.script.put(lose_and_come_back)
    scene.client.may_answer.set()
    scene.pass_time()
    ticket = scene.member.commit_async({P0: offset(2), P1: offset(2)})
    scene.until(lambda: ticket in results(scene), "the answer")
    assert asked(scene)[-1] == [(1, 2)]
    assert isinstance(results(scene)[ticket].failed[P0], PartitionLostError)
    assert results(scene)[ticket].committed == {P1}
    assert scene.member.commit({P0: offset(3)}).committed == {P0}


def test_what_a_caller_reads_of_the_group_is_not_taken_for_what_the_member_knows(
    scene: ScriptedMember,
) -> None:
    """A caller may ask for partitions of other members, which go on committing.

    Their moved offsets are no sign of a rebalance that the client did not tell of.
    """
    scene.client.stored = {P0: offset(1)}
    assert scene.member.committed([P0], 1.0) == {P0: offset(1)}
    assert scene.session.commits.moved({P0: offset(5)}) == []


@pytest.mark.parametrize(
    ("in_hold", "error"), [(False, RebalanceInProgressError), (True, PartitionLostError)]
)
def test_a_stale_generation_counts_as_fencing_only_in_a_hold(
    scene: ScriptedMember, *, in_hold: bool, error: type[Exception]
) -> None:
    """No newer one can be on its way to a client that waits for its callback."""
    if in_hold:
        scene.ask_for(P1)
    scene.client.answers = [KafkaError.ILLEGAL_GENERATION]
    assert isinstance(scene.member.commit({P0: offset(1)}).failed[P0], error)
    assert bool(scene.session.ended) is in_hold
