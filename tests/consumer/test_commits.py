"""Commits that are not waited for: what is sent when, and what an answer means that comes late."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.consumer import commits as commits_module
from dagster_rebalance.consumer.events import CommitAnswered, CommitResult, LostReason, MemberEvent
from dagster_rebalance.consumer.session import Session
from dagster_rebalance.consumer.settings import validated
from dagster_rebalance.core.errors import PartitionLostError, RebalanceInProgressError
from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = {"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"}
P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


def offset(number: int) -> OffsetAndMetadata:
    """An offset without metadata."""
    return OffsetAndMetadata(number)


class PatientConsumer(confluent_kafka.Consumer):
    """A client whose commits are answered when the test says so."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.asked: list[list[tuple[int, int]]] = []
        self.refusals: list[int] = []

    def commit(self, **request: Any) -> None:  # type: ignore[override]  # noqa: ANN401
        """Note it; one that is waited for may be refused."""
        self.asked.append([(tp.partition, tp.offset) for tp in request["offsets"]])
        if not request["asynchronous"] and self.refusals:
            raise KafkaException(KafkaError(self.refusals.pop(0)))


class Scene:
    """A session that owns two partitions, and its client."""

    def __init__(self) -> None:
        self.session = Session(validated(CONFIG, hold_limit_s=10), time.monotonic)
        self.session.consumer.close()
        self.client = PatientConsumer(dict(CONFIG))
        self.session.consumer = self.client
        self.grant(P0, P1)

    def grant(self, *partitions: TopicPartition) -> None:
        """Kafka assigns."""
        self.session._on_assign(self.client, [confluent_kafka.TopicPartition(tp.topic, tp.partition) for tp in partitions])

    def lose(self, *partitions: TopicPartition) -> None:
        """Kafka takes away."""
        theirs = [confluent_kafka.TopicPartition(tp.topic, tp.partition) for tp in partitions]
        self.session._on_lost(self.client, theirs)
        self.client.incremental_unassign(theirs)

    def hold(self) -> None:
        """Kafka asks for a partition."""
        self.session._on_revoke(self.client, [confluent_kafka.TopicPartition(P1.topic, P1.partition)])

    def answer(self, code: int | None = None) -> None:
        """Kafka answers the request that was sent last."""
        error = None if code is None else KafkaError(code)
        self.session._on_commit(error, [confluent_kafka.TopicPartition("orders", *pair) for pair in self.client.asked[-1]])

    def results(self) -> dict[int, CommitResult]:
        """What was told, by ticket."""
        happened: list[MemberEvent] = self.session.take()
        return {event.ticket: event.result for event in happened if isinstance(event, CommitAnswered)}


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A session whose broker nobody can reach."""
    made = Scene()
    yield made
    made.session.leave()
    made.session.wait(5.0)


def test_what_is_asked_for_meanwhile_goes_out_as_one_request(scene: Scene) -> None:
    """In order, and without a request for each record that somebody commits."""
    commits = scene.session.commits
    for ticket in range(1, 5):
        commits.begin(ticket, {P0: offset(ticket)})
    commits.begin(5, {P1: offset(9)})
    assert scene.client.asked == [[(0, 1)]]
    scene.answer()
    assert list(scene.results()) == [1]
    assert scene.client.asked[1:] == [[(0, 4), (1, 9)]]
    scene.answer()
    assert list(scene.results()) == [2, 3, 4, 5]
    assert not commits.pending


@pytest.mark.parametrize(("refusals", "attempts"), [(2, 3), (9, 6)])
def test_a_commit_waits_for_an_epoch_that_is_on_its_way(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, refusals: int, attempts: int
) -> None:
    """Else the last commit of a member that leaves fails because another one has just left, and its records come twice."""
    monkeypatch.setattr(commits_module, "_EPOCH_PAUSES_S", (0.0,) * 5)
    scene.client.refusals = [KafkaError.STALE_MEMBER_EPOCH] * refusals
    result = scene.session.commits.store({P0: offset(1)})
    assert scene.client.asked == [[(0, 1)]] * attempts
    assert [type(error) for error in result.failed.values()] == ([] if refusals < attempts else [RebalanceInProgressError])
    assert scene.session.ended is None


@pytest.mark.parametrize("code", [KafkaError.STALE_MEMBER_EPOCH, KafkaError.FENCED_MEMBER_EPOCH])
def test_no_newer_epoch_is_waited_for_where_none_can_come(scene: Scene, code: int) -> None:
    """In a hold a stale epoch is final, and so is a refusal of the member itself at any time."""
    if code == KafkaError.STALE_MEMBER_EPOCH:
        scene.hold()
    scene.client.refusals = [code] * 9
    assert isinstance(scene.session.commits.store({P0: offset(1)}).failed[P0], PartitionLostError)
    assert len(scene.client.asked) == 1


def test_a_commit_that_waits_for_a_lost_partition_is_never_sent(scene: Scene) -> None:
    """Not even when the partition comes back: it was meant for the earlier ownership."""
    commits = scene.session.commits
    commits.begin(1, {P0: offset(1)})
    commits.begin(2, {P0: offset(2), P1: offset(2)})
    scene.lose(P0)
    scene.grant(P0)
    scene.answer()
    commits.begin(3, {P0: offset(3)})
    assert scene.client.asked[-1] == [(1, 2)]
    scene.answer()
    assert scene.client.asked[-1] == [(0, 3)]
    scene.answer()
    results = scene.results()
    assert isinstance(results[2].failed[P0], PartitionLostError)
    assert results[2].committed == {P1}
    assert results[3].committed == {P0}


def test_what_the_group_has_is_unknown_while_a_commit_is_on_its_way(scene: Scene) -> None:
    """A probe would otherwise take the own commit for somebody else's."""
    commits = scene.session.commits
    commits.remember({P0: offset(1), P1: offset(1)})
    commits.begin(1, {P0: offset(2)})
    commits.remember({P0: offset(1), P1: offset(1)})
    assert commits.moved({P0: offset(2), P1: offset(5)}) == [P1]
    commits.begin(2, {P0: offset(3)})
    scene.answer()
    assert commits.moved({P0: offset(3)}) == []
    scene.answer()
    assert commits.moved({P0: offset(4)}) == [P0]


def test_what_a_caller_reads_of_the_group_is_not_taken_for_what_the_member_knows(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may ask for partitions of others, which go on committing; that is no rebalance that nobody told of."""
    stored = [confluent_kafka.TopicPartition(P0.topic, P0.partition, 1)]
    monkeypatch.setattr(scene.client, "committed", lambda *_args, **_settings: stored)
    commits = scene.session.commits
    assert commits.read([P0], 1.0) == {P0: offset(1)}
    assert commits.moved({P0: offset(5)}) == []


def test_a_stale_generation_counts_as_fencing_only_within_the_hold_that_it_was_asked_in(scene: Scene) -> None:
    """Asked before, it tells of the rebalance that led to the hold."""
    commits = scene.session.commits
    commits.begin(1, {P0: offset(1)})
    scene.hold()
    scene.answer(KafkaError.ILLEGAL_GENERATION)
    assert isinstance(scene.results()[1].failed[P0], RebalanceInProgressError)
    assert scene.session.ended is None
    commits.begin(2, {P0: offset(1)})
    scene.answer(KafkaError.ILLEGAL_GENERATION)
    assert isinstance(scene.results()[2].failed[P0], PartitionLostError)
    assert scene.session.ended is LostReason.FENCED


def test_a_membership_that_ends_owes_no_answer(scene: Scene) -> None:
    """Whoever asked hears that the partitions are lost, and that nobody knows what was stored."""
    commits = scene.session.commits
    commits.begin(1, {P0: offset(1)})
    commits.begin(2, {P1: offset(1)})
    commits.give_up()
    results = scene.results()
    assert [str(results[ticket].failed[tp]).count("not known") for ticket, tp in ((1, P0), (2, P1))] == [1, 1]
    assert not commits.pending
