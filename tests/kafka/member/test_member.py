"""Events, losses, probes, releases and leave of a member without a broker."""

from __future__ import annotations

import math
import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.core.model.errors import (
    BrokerError,
    ConfigurationError,
    IllegalStateError,
    PartitionLostError,
)
from dagster_rebalance.core.model.events import LostReason, PartitionsAssigned, PartitionsLost
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.consumer.caller_commits import CallerCommits
from dagster_rebalance.kafka.group_ports import CallbackFailed, CommitAnswered, RequestFailed
from dagster_rebalance.kafka.member import leave
from dagster_rebalance.kafka.member import session as session_module
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fake_group import ManualClock
from tests.kafka.clients import LIMIT_S, REQUEST_LIMIT_S, ScriptedMember, trouble

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Message

    from dagster_rebalance.kafka.group_ports import GroupEvent

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
LATE = KafkaError._MAX_POLL_EXCEEDED
FENCED = PartitionsLost((P0, P1), LostReason.FENCED)
CLAIMS = OffsetAndMetadata(5, "claims")


def no_client(_config: object) -> confluent_kafka.Consumer:
    raise KafkaException(KafkaError(KafkaError._INVALID_ARG))


def lost(scene: ScriptedMember) -> list[PartitionsLost]:

    def losses() -> list[PartitionsLost]:
        return [event for event in scene.told if isinstance(event, PartitionsLost)]

    scene.until(losses, "a loss")
    return losses()


def probed(scene: ScriptedMember, times: int = 1) -> None:
    wanted = scene.client.reads + times
    scene.until(lambda: scene.client.reads >= wanted or scene.session.end_reason, "a probe")


def test_late_poll_reports_the_loss_at_once(scene: ScriptedMember) -> None:

    def lose() -> Message | None:
        scene.session._on_lost(scene.client, scene.client.assignment())
        return None

    scene.client.script.put(lambda: trouble(LATE))
    scene.do(lose)
    assert scene.poll() == [PartitionsLost((P0, P1), LostReason.SESSION)]


def test_commit_async_of_an_unknown_member_reports_the_loss(scene: ScriptedMember) -> None:
    scene.client.answers = [KafkaError.UNKNOWN_MEMBER_ID]
    ticket = scene.member.commit_async({P0: OffsetAndMetadata(1)})
    assert lost(scene) == [FENCED]
    answer = scene.told[0]
    assert isinstance(answer, CommitAnswered)
    assert (answer.ticket, set(answer.result.failed)) == (ticket, {P0})


def test_commit_of_an_unknown_member_reports_the_loss(scene: ScriptedMember) -> None:
    scene.client.answers = [KafkaError.UNKNOWN_MEMBER_ID]
    assert set(scene.member.commit({P0: OffsetAndMetadata(1)}).failed) == {P0}
    assert lost(scene) == [FENCED]


def test_loss_is_reported_before_a_failed_rejoin(
    scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failed rejoin is reported, and the poll after it returns other events."""
    clock = ManualClock()
    scene = scripted(clock)
    make = confluent_kafka.Consumer

    def failed(events: list[GroupEvent]) -> list[bool]:
        return [
            isinstance(event, RequestFailed) and isinstance(event.error, ConfigurationError)
            for event in events
        ]

    monkeypatch.setattr(confluent_kafka, "Consumer", no_client)
    scene.session.end(LostReason.FENCED)
    told = scene.poll()
    assert told[0] == FENCED
    assert failed(told) == [False, True]
    assert scene.member.assignment() == frozenset()
    for _ in range(2):
        clock.advance(5.0)
        assert scene.poll() == []
        assert scene.poll() == [], "it is not tried again at once"
        clock.advance(5.0)
        assert failed(scene.poll()) == [True]
    monkeypatch.setattr(confluent_kafka, "Consumer", make)
    assert scene.poll() == []
    clock.advance(5.0)
    assert scene.poll() == []
    assert len(scene.clients) == 2, "and it rejoins"


def test_member_without_a_client_refuses_commits_and_closes(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(confluent_kafka, "Consumer", no_client)
    scene.session.end(LostReason.FENCED)
    assert scene.poll()[0] == FENCED
    failure = scene.member.commit({P0: CLAIMS}).failed[P0]
    assert isinstance(failure, PartitionLostError)
    assert "not assigned to this member" in str(failure)
    ticket = scene.member.commit_async({P0: CLAIMS})
    (answer,) = scene.poll()
    assert isinstance(answer, CommitAnswered)
    assert (answer.ticket, set(answer.result.failed)) == (ticket, {P0})
    scene.member.close(5.0)
    assert scene.client.is_closed


def ask(scene: ScriptedMember, question: str) -> object:
    return (
        scene.member.committed({P0}, REQUEST_LIMIT_S)
        if question == "committed"
        else scene.member.group_metadata()
    )


@pytest.mark.parametrize("question", ["committed", "group_metadata"])
def test_query_queued_after_a_fenced_commit_is_retriable(
    scene: ScriptedMember, question: str
) -> None:
    scene.client.may_answer.clear()
    scene.client.answers = [KafkaError.UNKNOWN_MEMBER_ID]
    scene.member.commit_async({P0: OffsetAndMetadata(1)})
    wait_until(lambda: scene.client.asked, timeout_s=LIMIT_S, what="the commit", interval_s=0.001)
    submit = scene.session.submit

    def then_answer(function: Callable[[], object]) -> object:
        future = submit(function)
        scene.client.may_answer.set()
        return future

    scene.session.submit = then_answer  # type: ignore[method-assign,assignment]
    with pytest.raises(BrokerError, match="membership has ended: poll, then retry") as caught:
        ask(scene, question)
    assert caught.value.retriable
    assert lost(scene) == [FENCED]
    assert ask(scene, question) is not None


def test_group_metadata_queued_after_a_commit_times_out(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_rebalance.kafka.member.member._READ_TIMEOUT_S", 0.01)
    scene.client.may_answer.clear()
    scene.member.commit_async({P0: OffsetAndMetadata(1)})
    wait_until(lambda: scene.client.asked, timeout_s=LIMIT_S, what="the commit", interval_s=0.001)
    with pytest.raises(BrokerError, match="metadata of group 'etl' failed") as caught:
        scene.member.group_metadata()
    assert caught.value.retriable


def test_group_metadata_waits_for_the_report_of_a_loss(scene: ScriptedMember) -> None:
    """The broker would accept transactional offsets of lost partitions with the new metadata."""
    scene.session.end(LostReason.FENCED)
    with pytest.raises(BrokerError, match="which no poll has returned yet") as caught:
        scene.member.group_metadata()
    assert caught.value.retriable
    assert scene.poll() == [FENCED]
    assert scene.member.group_metadata() is not None


def test_group_metadata_waits_for_a_loss_that_arrives_first(scene: ScriptedMember) -> None:
    submit = scene.session.submit

    def after_a_loss(function: Callable[[], object]) -> object:
        scene.lose(P0)
        return submit(function)

    scene.session.submit = after_a_loss  # type: ignore[method-assign,assignment]
    with pytest.raises(BrokerError, match="which no poll has returned yet") as caught:
        scene.member.group_metadata()
    assert caught.value.retriable
    assert scene.poll() == [PartitionsLost((P0,), LostReason.SESSION)]


@pytest.mark.parametrize("question", ["committed", "group_metadata"])
def test_query_of_a_member_without_a_client_is_retriable(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:

    monkeypatch.setattr(confluent_kafka, "Consumer", no_client)
    scene.session.end(LostReason.FENCED)
    with pytest.raises(BrokerError, match="membership has ended") as caught:
        ask(scene, question)
    assert caught.value.retriable


def test_notifications_do_not_accumulate(scene: ScriptedMember) -> None:
    for _ in range(3):
        scene.told.clear()
        scene.member.commit_async({P0: OffsetAndMetadata(1)})
        scene.until(lambda: scene.told, "the answer")
    assert scene.session._notifications.qsize() == 1


def test_signal_handler_that_raises_loses_no_event(scene: ScriptedMember) -> None:

    def interrupted() -> None:
        vars(scene.session).pop("take_event")
        raise KeyboardInterrupt

    vars(scene.session)["take_event"] = interrupted
    scene.lose(P0)
    scene.grant(P0)
    with pytest.raises(KeyboardInterrupt):
        scene.poll()
    assert [type(event) for event in scene.poll()] == [PartitionsLost, PartitionsAssigned]
    assert scene.member.commit({P0: OffsetAndMetadata(1)}).committed == {P0}


def test_failed_release_ends_the_membership(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.ask_for(P1)
    scene.until(lambda: scene.member.held, "the request")

    def fail(*_: object, **__: object) -> None:
        msg = "closed"
        raise RuntimeError(msg)

    monkeypatch.setattr(session_module, "unassign", fail)
    scene.member.release()
    assert lost(scene) == [PartitionsLost((P0,), LostReason.FAILED)]


def fail(*_: object, **__: object) -> None:
    raise KafkaException(KafkaError(KafkaError._STATE))


def test_hold_that_fails_ends_the_membership(scene: ScriptedMember) -> None:
    vars(scene.session.probe)["start"] = fail
    scene.ask_for(P1)
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.FAILED)]
    assert scene.client.calls[:2] == ["unsubscribe", "unassign"]


def test_assignment_that_cannot_be_paused_ends_the_membership(scene: ScriptedMember) -> None:
    """Otherwise the client would have a partition that the member does not have."""
    vars(scene.client)["pause"] = fail
    scene.grant(TopicPartition("orders", 2))
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.FAILED)]


def test_member_whose_thread_failed_rejoins_after_a_pause(
    scripted: Callable[..., ScriptedMember],
) -> None:
    clock = ManualClock()
    scene = scripted(clock)
    vars(scene.client)["assignment"] = fail
    scene.grant(P0)
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.FAILED)]
    scene.poll()
    assert len(scene.clients) == 1
    clock.advance(5.0)
    scene.poll()
    assert len(scene.clients) == 2


@pytest.mark.parametrize("code", [KafkaError._AUTHENTICATION, KafkaError._TRANSPORT])
def test_error_of_the_client_is_remembered_once(scene: ScriptedMember, code: int) -> None:
    scene.do(lambda: scene.session._on_error(KafkaError(code)))
    assert list(scene.session.recent_errors) == [KafkaError(code)]


def test_commit_of_a_wrong_value_is_refused_and_blocks_no_other(scene: ScriptedMember) -> None:
    wrong: Any = {P0: 5}
    with pytest.raises(
        TypeError, match="orders-0 must be an OffsetAndMetadata with the next offset, not 5"
    ):
        scene.member.commit_async(wrong)
    assert scene.member.settle(0)
    assert scene.member.commit({P0: OffsetAndMetadata(5)}).committed == {P0}
    assert scene.client.asked == [[(0, 5, "")]]


def test_commits_are_sent_during_a_hold(scene: ScriptedMember) -> None:
    scene.ask_for(P1)
    assert scene.member.commit({P0: OffsetAndMetadata(1), P1: OffsetAndMetadata(2)}).committed == {
        P0,
        P1,
    }
    assert [(0, 1, ""), (1, 2, "")] in scene.client.asked
    assert scene.session.hold is not None


def test_release_is_sent_after_earlier_commits(scene: ScriptedMember) -> None:
    scene.ask_for(P1)
    scene.until(lambda: scene.member.held, "the revoke request")
    scene.client.may_answer.clear()
    scene.member.commit_async({P1: OffsetAndMetadata(7)})
    scene.member.release()
    assert scene.client.unassigned == []
    scene.client.may_answer.set()
    scene.until(lambda: scene.client.unassigned, "the release")
    assert scene.client.asked[-1] == [(1, 7, "")]
    assert scene.member.assignment() == {P0}


def test_commit_for_an_earlier_ownership_is_not_sent(scene: ScriptedMember) -> None:
    scene.lose(P0)
    scene.grant(P0)
    result = scene.member.commit({P0: OffsetAndMetadata(1), P1: OffsetAndMetadata(1)})
    assert isinstance(result.failed[P0], PartitionLostError)
    assert scene.client.asked == [[(1, 1, "")]]
    assert scene.member.committed([P1], 1.0) == {P1: None}
    again = scene.member.commit({P0: OffsetAndMetadata(1)})
    assert isinstance(again.failed[P0], PartitionLostError), "the event was not polled yet"
    assert [type(event) for event in scene.poll()] == [PartitionsLost, PartitionsAssigned]
    assert scene.member.commit({P0: OffsetAndMetadata(2)}).committed == {P0}


def test_probe_does_not_delay_poll_and_release(scene: ScriptedMember) -> None:
    scene.client.may_answer.clear()
    scene.ask_for(P1)
    probed(scene)
    scene.until(lambda: scene.client.asked, "the probe's commit")
    assert scene.poll() == []
    scene.member.release()
    assert scene.member.assignment() == {P0}
    scene.client.may_answer.set()
    scene.until(lambda: scene.client.unassigned, "the release")


def test_probe_stores_nothing(scene: ScriptedMember) -> None:
    """A transaction may have moved the offset since the probe read it."""
    scene.client.stored = {P0: CLAIMS, P1: CLAIMS}
    scene.ask_for(P1)
    probed(scene, 3)
    assert {
        (partition, offset, len(text))
        for request in scene.client.asked
        for partition, offset, text in request
    } == {(0, 5, 32_000)}
    assert scene.session.end_reason is None


@pytest.mark.parametrize(
    "code",
    [KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION, KafkaError.STALE_MEMBER_EPOCH],
)
def test_probe_detects_a_fenced_member(scene: ScriptedMember, code: int) -> None:
    scene.client.probe_answer = code
    scene.ask_for(P1)
    assert lost(scene) == [FENCED]


def test_on_commit_is_called_in_the_callers_thread_and_not_for_probes(
    scripted: Callable[..., ScriptedMember],
) -> None:
    seen: list[tuple[int, int]] = []
    scene = scripted(
        on_commit=lambda _error, partitions: seen.append((len(partitions), threading.get_ident()))
    )
    scene.ask_for(P1)
    probed(scene, 2)
    assert seen == []
    scene.member.commit_async({P0: OffsetAndMetadata(1)})
    scene.until(lambda: seen, "the callback")
    assert seen == [(1, threading.get_ident())]


def test_stored_probe_is_replaced_and_not_repeated(scene: ScriptedMember) -> None:
    scene.client.stored = {P0: CLAIMS}
    scene.client.probe_answer = None
    assert scene.member.commit({P0: CLAIMS}).committed == {P0}
    scene.ask_for(P1)
    probed(scene, 3)
    assert [request[0][2][:6] for request in scene.client.asked] == ["claims", "------", "claims"]
    assert scene.session.end_reason is None


def test_stored_probe_is_replaced_with_an_earlier_owners_commit(scene: ScriptedMember) -> None:
    scene.client.stored = {P0: CLAIMS}
    scene.client.probe_answer = None
    scene.ask_for(P1)
    probed(scene, 2)
    assert scene.client.asked[-1] == [(0, 5, "claims")]


def test_probe_detects_a_moved_offset_of_a_held_partition_only(scene: ScriptedMember) -> None:
    scene.client.stored = {P0: OffsetAndMetadata(1), P1: OffsetAndMetadata(1)}
    scene.ask_for(P1)
    probed(scene)
    scene.client.stored = {P0: OffsetAndMetadata(2), P1: OffsetAndMetadata(1)}
    probed(scene, 2)
    assert scene.session.end_reason is None
    scene.client.stored = {P0: OffsetAndMetadata(2), P1: OffsetAndMetadata(2)}
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.SUPERSEDED)]


def test_probe_ignores_moved_offsets_once_transactions_may_commit(scene: ScriptedMember) -> None:
    scene.member.group_metadata()
    scene.ask_for(P1)
    for offset in range(4):
        scene.client.stored = dict.fromkeys((P0, P1), OffsetAndMetadata(offset))
        probed(scene)
    assert scene.session.end_reason is None


def test_probe_ignores_commits_of_an_earlier_ownership(scene: ScriptedMember) -> None:
    scene.member.commit({P1: OffsetAndMetadata(1)})
    scene.client.stored = {P1: OffsetAndMetadata(9)}
    scene.lose(P1)
    scene.grant(P1)
    scene.ask_for(P1)
    probed(scene, 2)
    assert scene.session.end_reason is None


def test_probe_ignores_deleted_offsets(scene: ScriptedMember) -> None:
    assert scene.member.commit({P1: OffsetAndMetadata(1)}).committed == {P1}
    scene.ask_for(P1)
    probed(scene, 2)
    assert scene.session.end_reason is None


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize(
    "refusal", [KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED]
)
def test_probe_moves_to_another_topic_after_a_refusal(
    scene: ScriptedMember, refusal: int, *, is_read: bool
) -> None:
    first, last = TopicPartition("a", 7), TopicPartition("z", 8)
    scene.lose(P0)
    scene.grant(first, last)
    scene.poll()
    answers = {first: refusal, last: KafkaError.ILLEGAL_GENERATION}
    scene.client.refused, scene.client.probe_answer = answers, None
    scene.client.unreadable = {first: refusal} if is_read else {}
    scene.ask_for(P1)
    (loss,) = lost(scene)
    assert loss.reason is LostReason.FENCED
    sent = [request[0][0] for request in scene.client.asked]
    assert sent == ([8] if is_read else [7, 8])


def test_revoke_queued_before_the_end_of_the_session_is_a_loss(scene: ScriptedMember) -> None:
    """librdkafka#5604: the classic client still calls back."""
    scene.client.stored = KafkaError._TIMED_OUT

    def revoke_late() -> None:
        scene.client.id = ""
        scene.session._on_revoke(
            scene.client, [confluent_kafka.TopicPartition(P1.topic, P1.partition)]
        )

    scene.client.script.put(revoke_late)
    assert lost(scene) == [FENCED]


def test_probe_stops_if_every_topic_is_refused(scene: ScriptedMember) -> None:
    scene.client.probe_answer = KafkaError.UNKNOWN_TOPIC_OR_PART
    scene.ask_for(P1)
    probed(scene, 4)
    assert len(scene.client.asked) == 1
    assert scene.session.end_reason is None


def test_probe_waits_for_the_end_of_a_transaction(scene: ScriptedMember) -> None:
    scene.client.kept_back = frozenset({P0, P1})
    scene.ask_for(P1)
    probed(scene, 8)
    assert scene.client.asked == []
    scene.client.kept_back = frozenset()
    scene.until(lambda: scene.client.asked, "a probe")
    assert scene.session.end_reason is None


def test_probe_ignores_a_timeout(scene: ScriptedMember) -> None:
    scene.client.stored = KafkaError._TIMED_OUT
    scene.ask_for(P1)
    probed(scene, 2)
    assert scene.session.end_reason is None
    assert scene.client.asked == []


def test_refused_release_is_reported_as_superseded(scene: ScriptedMember) -> None:
    scene.ask_for(P1)
    scene.until(lambda: scene.member.held, "the revoke request")
    scene.session.consumer.unassign()
    scene.member.release()
    assert lost(scene) == [PartitionsLost((P0,), LostReason.SUPERSEDED)]


def test_ended_hold_unsubscribes_before_it_unassigns(scene: ScriptedMember) -> None:
    """After an unsubscribe, a late unassign cannot give away a new grant."""
    scene.client.probe_answer = KafkaError.UNKNOWN_MEMBER_ID
    scene.ask_for(P1)
    assert lost(scene) == [FENCED]
    scene.until(lambda: scene.client.is_closed, "the old client to leave")
    assert scene.client.calls[:2] == ["unsubscribe", "unassign"]


def test_events_after_the_end_of_the_membership_are_dropped(scene: ScriptedMember) -> None:

    def end_and_lose() -> Message | None:
        scene.session.end(LostReason.FENCED)
        scene.session._on_lost(scene.client, scene.client.assignment())
        return None

    scene.client.script.put(end_and_lose)
    assert lost(scene) == [FENCED]


def test_close_releases_the_hold(scene: ScriptedMember) -> None:
    scene.ask_for(P1)
    scene.member.close(5.0)
    assert scene.client.is_closed
    assert [1] in scene.client.unassigned


def test_caller_that_stops_polling_loses_all_partitions(
    scripted: Callable[..., ScriptedMember],
) -> None:
    clock = ManualClock()
    scene = scripted(clock)
    scene.member.subscribe(["orders"])
    scene.poll()
    clock.advance(scene.session._settings.max_poll_interval_s + 0.1)
    wait_until(lambda: scene.session.end_reason, timeout_s=120, what="the session to end")
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.SESSION)]


def test_hold_expires_at_max_poll_interval(scripted: Callable[..., ScriptedMember]) -> None:
    clock = ManualClock()
    scene = scripted(clock)
    scene.ask_for(P1)
    clock.advance(scene.session._settings.max_poll_interval_s - 0.1)
    scene.poll()
    assert scene.session.end_reason is None
    clock.advance(0.2)
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.EXPIRED)]


def test_hold_expires_while_the_thread_waits_for_a_broker(
    scripted: Callable[..., ScriptedMember],
) -> None:
    clock = ManualClock()
    scene = scripted(clock)
    scene.ask_for(P1)
    scene.until(lambda: scene.member.held, "the revoke request")
    scene.client.may_answer.clear()
    ticket = scene.member.commit_async({P1: OffsetAndMetadata(7)})
    scene.until(
        lambda: scene.client.asked and scene.client.asked[-1] == [(1, 7, "")],
        "the commit to be in flight",
    )
    clock.advance(scene.session._settings.max_poll_interval_s + 1.1)
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.EXPIRED)]
    (answer,) = [event for event in scene.told if isinstance(event, CommitAnswered)]
    assert answer.ticket == ticket
    assert "not known whether it was stored" in str(answer.result.failed[P1])


def test_failure_of_the_thread_is_reported_as_a_loss(
    scene: ScriptedMember, caplog: pytest.LogCaptureFixture
) -> None:

    def fail() -> Message | None:
        msg = "a defect"
        raise RuntimeError(msg)

    scene.client.script.put(fail)
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.FAILED)]
    assert "a defect" in caplog.text


def test_loss_is_reported_before_the_old_client_has_left(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_leave = threading.Event()

    def slow(client: Any) -> None:  # noqa: ANN401 - the client
        assert may_leave.wait(LIMIT_S)
        leave.leave(client)

    monkeypatch.setattr(session_module, "leave", slow)
    scene.session.end(LostReason.FENCED)
    assert scene.poll() == [FENCED]
    assert scene.session.is_leaving
    may_leave.set()
    scene.member.close(5.0)
    assert not scene.session.is_leaving


def test_close_accepts_an_infinite_timeout(
    scene: ScriptedMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[bool] = []

    def wait(timeout_s: float) -> None:
        waits.append(threading.Lock().acquire(timeout=timeout_s))

    monkeypatch.setattr(scene.session._life, "result", wait)
    scene.member.close(math.inf)
    assert waits == [True]


@pytest.mark.parametrize("callback", ["on_commit", "stats_cb", "error_cb", "throttle_cb"])
def test_exception_of_a_user_callback_is_reported_once(
    scripted: Callable[..., ScriptedMember], callback: str
) -> None:
    problem = ValueError("a bug of the user's")

    def fail(*_arguments: object) -> None:
        raise problem

    scene = scripted(**{callback: fail})
    if callback == "on_commit":
        scene.member.commit_async({P0: OffsetAndMetadata(1)})
    elif callback == "stats_cb":
        scene.do(lambda: scene.session._on_statistics("{}"))
    elif callback == "error_cb":
        scene.do(lambda: scene.session._on_error(KafkaError(KafkaError._TRANSPORT)))
    else:
        scene.do(lambda: scene.session.call_user("throttle_cb", None))
    scene.until(lambda: CallbackFailed(problem) in scene.told, "the failure")
    assert scene.told.count(CallbackFailed(problem)) == 1
    assert scene.session.end_reason is None


def test_poll_inside_a_user_callback_is_refused(scripted: Callable[..., ScriptedMember]) -> None:
    refused: list[str] = []

    def poll(_raw: str) -> None:
        try:
            stage.member.poll(0)
        except IllegalStateError as problem:
            refused.append(str(problem))

    stage = scripted(stats_cb=poll)
    stage.do(lambda: stage.session._on_statistics("{}"))
    stage.until(lambda: refused, "the refusal")
    assert "inside a callback" in refused[0]


def test_commit_with_a_timeout_inside_a_user_callback_is_not_sent(
    scripted: Callable[..., ScriptedMember],
) -> None:
    refused: list[str] = []

    def commit(_raw: str) -> None:
        try:
            commits.commit({P0: OffsetAndMetadata(1)}, timeout_s=2.0)
        except IllegalStateError as problem:
            refused.append(str(problem))

    scene = scripted(stats_cb=commit)
    commits = CallerCommits(scene.member, {P0, P1}, pending=(), marked=frozenset())
    scene.do(lambda: scene.session._on_statistics("{}"))
    scene.until(lambda: refused, "the refusal")
    scene.pass_time()
    assert "a commit with a timeout inside a callback" in refused[0]
    assert scene.client.asked == []


def test_missing_topic_is_reported_once_until_assigned(scene: ScriptedMember) -> None:

    def missing() -> list[object]:
        for _ in range(3):
            scene.do(lambda: trouble(KafkaError.UNKNOWN_TOPIC_OR_PART, "oders"))
        return [event for event in scene.poll() if isinstance(event, RequestFailed)]

    assert [str(event).count("create the topic") for event in missing()] == [1]
    assert missing() == []
    scene.grant(TopicPartition("oders", 0))
    assert len(missing()) == 1


def test_other_errors_of_a_topic_are_reported_each_time(scene: ScriptedMember) -> None:
    for _ in range(2):
        scene.do(lambda: trouble(KafkaError.TOPIC_AUTHORIZATION_FAILED, "orders"))
    assert len([event for event in scene.poll() if isinstance(event, RequestFailed)]) == 2


def test_fatal_error_is_reported_once_and_the_client_replaced_later(
    scripted: Callable[..., ScriptedMember],
) -> None:
    clock = ManualClock()
    scene = scripted(clock)

    def fail() -> Message | None:
        raise KafkaException(KafkaError(KafkaError._FATAL, "the end", fatal=True))

    scene.do(fail)
    loss, failure = scene.poll()
    assert loss == PartitionsLost((P0, P1), LostReason.SESSION)
    assert isinstance(failure, RequestFailed)
    assert "the end" in str(failure.error)
    assert scene.member.assignment() == frozenset()
    assert scene.poll() == scene.poll() == []
    assert len(scene.clients) == 1
    clock.advance(5.0)
    assert scene.poll() == []
    assert len(scene.clients) == 2


def test_fatal_answer_to_a_probe_is_a_loss(scene: ScriptedMember) -> None:
    scene.client.stored = KafkaError._FATAL
    scene.ask_for(P1)
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.SESSION)]
    assert isinstance(scene.told[-1], RequestFailed)


def test_fatal_error_ends_a_waiting_poll(
    scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_rebalance.kafka.member.member._WAIT_SLICE_S", 10 * LIMIT_S)
    scene, told = scripted(), queue.SimpleQueue[list["GroupEvent"]]()
    poll = partial(scene.member.poll, 10 * LIMIT_S)
    threading.Thread(target=lambda: told.put(poll()), daemon=True).start()
    scene.do(partial(trouble, KafkaError._FATAL))
    assert isinstance(told.get(timeout=LIMIT_S)[-1], RequestFailed)


def test_classic_member_pauses_discovery_until_the_rebalance_is_over(
    scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, looked = scripted(**{"group.protocol": "classic"}), []
    scene.ask_for(P1)
    scene.until(lambda: scene.member.held, "the revoke request")
    monkeypatch.setattr(
        "dagster_rebalance.kafka.member.topic_discovery.Discovery.refresh",
        lambda *_: looked.append("looked"),
    )
    scene.member.release()
    scene.until(lambda: scene.client.unassigned, "the release")
    scene.pass_time()
    assert not looked
    scene.grant()
    scene.pass_time()
    assert looked
