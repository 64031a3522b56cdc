"""Commits: the order of requests, and the meaning of their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import confluent_kafka
import pytest
from confluent_kafka import KafkaError

from dagster_rebalance.core.model import commit_requests
from dagster_rebalance.core.model.errors import PartitionLostError, RebalanceInProgressError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.group_ports import CommitAnswered, CommitResult
from dagster_rebalance.kafka.member import commits as commits_module

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kafka.clients import ScriptedMember

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
OTHER = TopicPartition("payments", 5)
UNKNOWN = KafkaError.UNKNOWN_TOPIC_OR_PART
TOO_LARGE = KafkaError.OFFSET_METADATA_TOO_LARGE
FORBIDDEN = KafkaError.TOPIC_AUTHORIZATION_FAILED


def offset(number: int) -> OffsetAndMetadata:
    return OffsetAndMetadata(number)


def results(scene: ScriptedMember) -> dict[int, CommitResult]:
    return {event.ticket: event.result for event in scene.told if isinstance(event, CommitAnswered)}


def asked(scene: ScriptedMember) -> list[list[tuple[int, int]]]:
    return [[(partition, at) for partition, at, _ in request] for request in scene.client.asked]


def test_commits_during_a_request_go_out_as_one(scene: ScriptedMember) -> None:
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
def test_commit_with_a_stale_epoch_is_retried(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch, refusals: int, attempts: int
) -> None:
    """Otherwise a leaving member's last commit fails if another has just left."""
    monkeypatch.setattr(commits_module, "_EPOCH_PAUSES_S", (0.0,) * 5)
    scene.client.answers = [KafkaError.STALE_MEMBER_EPOCH] * refusals
    result = scene.member.commit({P0: offset(1)})
    scene.client.answers = []
    assert asked(scene) == [[(0, 1)]] * attempts
    assert [type(error) for error in result.failed.values()] == (
        [] if refusals < attempts else [RebalanceInProgressError]
    )
    assert scene.session.end_reason is None


@pytest.mark.parametrize("code", [KafkaError.STALE_MEMBER_EPOCH, KafkaError.FENCED_MEMBER_EPOCH])
def test_commit_with_a_stale_epoch_is_final_in_a_hold(scene: ScriptedMember, code: int) -> None:
    if code == KafkaError.STALE_MEMBER_EPOCH:
        scene.client.stored = KafkaError._TIMED_OUT  # no probe
        scene.ask_for(P1)
    scene.client.answers = [code] * 9
    assert isinstance(scene.member.commit({P0: offset(1)}).failed[P0], PartitionLostError)
    assert len(scene.client.asked) == 1


def test_waiting_commit_of_a_lost_partition_is_not_sent(scene: ScriptedMember) -> None:
    """Even if the partition comes back: the commit was for the earlier ownership."""
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


def test_committed_does_not_record_offsets_for_the_probe(scene: ScriptedMember) -> None:
    """A caller may read partitions of other members, which go on committing."""
    scene.client.stored = {P0: offset(1)}
    assert scene.member.committed([P0], 1.0) == {P0: offset(1)}
    assert scene.session.commits.moved({P0: offset(5)}) == []


@pytest.mark.parametrize(
    ("in_hold", "error"), [(False, RebalanceInProgressError), (True, PartitionLostError)]
)
def test_stale_generation_ends_the_membership_only_in_a_hold(
    scene: ScriptedMember, *, in_hold: bool, error: type[Exception]
) -> None:
    if in_hold:
        scene.ask_for(P1)
    scene.client.answers = [KafkaError.ILLEGAL_GENERATION]
    assert isinstance(scene.member.commit({P0: offset(1)}).failed[P0], error)
    assert bool(scene.session.end_reason) is in_hold


def test_commit_beyond_the_request_limit_is_split(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_requests, "MAX_REQUEST_BYTES", 150)
    assert scene.member.commit({P0: offset(1), P1: offset(2)}).committed == {P0, P1}
    assert asked(scene) == [[(0, 1)], [(1, 2)]]


def test_split_commit_stops_after_a_failed_request(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead broker takes 46 s to fail each request."""
    monkeypatch.setattr(commit_requests, "MAX_REQUEST_BYTES", 150)
    scene.client.answers = [KafkaError._TIMED_OUT]
    result = scene.member.commit({P0: offset(1), P1: offset(2)})
    assert asked(scene) == [[(0, 1)]]
    assert {tp: error.retriable for tp, error in result.failed.items()} == {P0: True, P1: True}


def test_split_commit_continues_after_a_refused_partition(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_requests, "MAX_REQUEST_BYTES", 150)
    scene.client.refused = {P0: TOO_LARGE}
    assert scene.member.commit({P0: offset(1), P1: offset(2)}).committed == {P1}


def test_commit_reports_the_error_of_each_refused_topic(scene: ScriptedMember) -> None:
    """The client raises the error of one partition for the whole request."""
    scene.grant(OTHER)
    scene.poll()
    scene.client.refused = {P0: FORBIDDEN, OTHER: TOO_LARGE}
    result = scene.member.commit({P0: offset(1), P1: offset(2), OTHER: offset(3)})
    assert result.committed == {P1}
    assert "READ" in str(result.failed[P0])
    assert "characters" in str(result.failed[OTHER])
    assert asked(scene) == [[(0, 1), (1, 2), (5, 3)], [(0, 1)], [(5, 3)]]


def test_refused_commit_without_read_reports_the_error_of_the_read(scene: ScriptedMember) -> None:
    scene.client.refused = {P0: UNKNOWN}
    scene.client.unreadable = {P0: FORBIDDEN}
    result = scene.member.commit({P0: offset(1), P1: offset(2)})
    assert result.committed == {P1}
    assert "READ" in str(result.failed[P0])


def test_refused_commit_without_an_answer_is_retriable_for_all(scene: ScriptedMember) -> None:
    scene.client.refused = {P0: TOO_LARGE}
    scene.client.stored = KafkaError._TIMED_OUT
    result = scene.member.commit({P0: offset(1), P1: offset(2)})
    assert {tp: error.retriable for tp, error in result.failed.items()} == {P0: True, P1: True}


def test_commit_timeout_after_an_unknown_topic_is_no_deletion(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_requests, "GONE_AFTER_S", 0.0)
    scene.client.refused = {P0: UNKNOWN}
    scene.member.commit({P0: offset(1), P1: offset(2)})
    scene.client.refused = {}
    scene.client.answers = [KafkaError._TIMED_OUT]
    error = scene.member.commit({P0: offset(1)}).failed[P0]
    assert not isinstance(error, PartitionLostError)
    assert error.retriable


def test_on_commit_is_called_once_for_each_outcome(
    scripted: Callable[..., ScriptedMember],
) -> None:
    heard: list[tuple[int | None, list[int]]] = []
    made = scripted(
        on_commit=lambda error, partitions: heard.append(
            (error and error.code(), [tp.partition for tp in partitions])
        )
    )
    made.client.refused = {P0: TOO_LARGE}
    made.member.commit_async({P0: offset(1), P1: offset(2)})
    made.until(lambda: len(heard) == 2, "both calls")
    assert heard == [(TOO_LARGE, [0]), (None, [1])]


def test_requests_shrink_after_a_broker_refuses_one(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker does not report its limit."""
    monkeypatch.setattr(commit_requests, "MAX_REQUEST_BYTES", 400)
    scene.client.answers = [KafkaError.UNKNOWN]
    assert scene.member.commit({P0: offset(1), P1: offset(2)}).committed == {P0, P1}
    assert scene.member.commit({P0: offset(3), P1: offset(4)}).committed == {P0, P1}
    assert asked(scene) == [[(0, 1), (1, 2)], [(0, 1)], [(1, 2)], [(0, 3)], [(1, 4)]]


def test_requests_shrink_once_for_all_parts_of_a_commit(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [TopicPartition("orders", number) for number in range(2, 36)]
    scene.grant(*many)
    scene.poll()
    monkeypatch.setattr(commit_requests, "MAX_REQUEST_BYTES", 1_600)
    scene.client.too_many = 5
    assert scene.member.commit(dict.fromkeys(many, offset(1))).committed == frozenset(many)
    assert scene.session.commits._share == 4


def test_unknown_error_of_a_small_request_is_reported(scene: ScriptedMember) -> None:
    scene.client.answers = [KafkaError.UNKNOWN]
    assert scene.member.commit({P0: offset(1), P1: offset(2)}).failed.keys() == {P0, P1}
    assert len(scene.client.asked) == 1
