"""What a member makes of its client's news, without a broker.

The tests cover losses, probes, releases and leave.
"""

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
from tests.kafka.clients import LIMIT_S, ScriptedMember, trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from confluent_kafka import Message

    from dagster_rebalance.kafka.group_ports import MemberEvent

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
LATE = KafkaError._MAX_POLL_EXCEEDED
FENCED = PartitionsLost((P0, P1), LostReason.FENCED)
CLAIMS = OffsetAndMetadata(5, "claims")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ScriptedMember]]:
    """Makes members that own two partitions; they have left when the test ends."""
    made: list[ScriptedMember] = []

    def make(clock: ManualClock | None = None, **settings: object) -> ScriptedMember:
        made.append(ScriptedMember(monkeypatch, settings, **({"clock": clock} if clock else {})))
        made[-1].grant(P0, P1)
        assert made[-1].poll() == [PartitionsAssigned((P0, P1))]
        return made[-1]

    yield make
    for each in made:
        each.close()


def lost(scene: ScriptedMember) -> list[PartitionsLost]:
    """Poll until a loss is told; all of them."""

    def losses() -> list[PartitionsLost]:
        return [event for event in scene.told if isinstance(event, PartitionsLost)]

    scene.until(losses, "a loss")
    return losses()


def probed(scene: ScriptedMember, times: int = 1) -> None:
    """Wait for probes."""
    wanted = scene.client.reads + times
    scene.until(lambda: scene.client.reads >= wanted or scene.session.end_reason, "a probe")


def test_a_poll_that_comes_too_late_tells_the_loss_at_once(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """The client queues the error before the callback, and both are taken at once."""
    scene = scripted()

    def lose() -> Message | None:
        scene.session._on_lost(scene.client, scene.client.assignment())
        return None

    scene.client.script.put(lambda: trouble(LATE))
    scene.do(lose)
    assert scene.poll() == [PartitionsLost((P0, P1), LostReason.SESSION)]


def test_an_unknown_member_hears_of_its_loss(scripted: Callable[..., ScriptedMember]) -> None:
    """The broker has given its partitions away, and the client tells so some polls later."""
    scene = scripted()
    scene.client.answers = [KafkaError.UNKNOWN_MEMBER_ID]
    ticket = scene.member.commit_async({P0: OffsetAndMetadata(1)})
    assert lost(scene) == [FENCED]
    answer = scene.told[0]
    assert isinstance(answer, CommitAnswered)
    assert (answer.ticket, set(answer.result.failed)) == (ticket, {P0})


def test_a_member_that_a_waited_for_commit_finds_unknown_hears_of_its_loss(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """The same, where the answer is the result of the call."""
    scene = scripted()
    scene.client.answers = [KafkaError.UNKNOWN_MEMBER_ID]
    assert set(scene.member.commit({P0: OffsetAndMetadata(1)}).failed) == {P0}
    assert lost(scene) == [FENCED]


def test_a_loss_is_told_also_where_the_next_client_cannot_be_made(
    scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate is being exchanged, say: the work on the partitions would go on beside others'.

    The poll behind the one that told the failure fails not: only a poll that returns can tell what
    happened to everybody.
    """
    clock = ManualClock()
    scene = scripted(clock)
    make = confluent_kafka.Consumer

    def failing(_config: object) -> confluent_kafka.Consumer:
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG))

    def failed(events: list[MemberEvent]) -> list[bool]:
        return [
            isinstance(event, RequestFailed) and isinstance(event.error, ConfigurationError)
            for event in events
        ]

    monkeypatch.setattr(confluent_kafka, "Consumer", failing)
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
    assert len(scene.clients) == 2, "and it joins anew"


def test_a_member_whose_next_client_cannot_be_made_refuses_commits_and_can_be_closed(
    scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not closed, and nothing is assigned to it."""
    scene = scripted()

    def failing(_config: object) -> confluent_kafka.Consumer:
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG))

    monkeypatch.setattr(confluent_kafka, "Consumer", failing)
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
    """Ask the member."""
    return (
        scene.member.committed({P0}, LIMIT_S)
        if question == "committed"
        else scene.member.group_metadata()
    )


@pytest.mark.parametrize("question", ["committed", "group_metadata"])
def test_what_is_asked_behind_a_commit_that_finds_the_member_unknown_is_to_be_asked_again(
    scripted: Callable[..., ScriptedMember], question: str
) -> None:
    """The client is closed when its turn comes, and says that with an error of Python's."""
    scene = scripted()
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
    with pytest.raises(BrokerError, match="membership has ended: poll, then ask again") as caught:
        ask(scene, question)
    assert caught.value.retriable
    assert lost(scene) == [FENCED]
    assert ask(scene, question) is not None


def test_an_unanswered_question_for_the_metadata_of_the_group_is_an_error_of_the_brokers(
    scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the member waits for a coordinator that is away."""
    monkeypatch.setattr("dagster_rebalance.kafka.member.member._READ_TIMEOUT_S", 0.01)
    scene = scripted()
    scene.client.may_answer.clear()
    scene.member.commit_async({P0: OffsetAndMetadata(1)})
    wait_until(lambda: scene.client.asked, timeout_s=LIMIT_S, what="the commit", interval_s=0.001)
    with pytest.raises(BrokerError, match="metadata of group 'etl' failed") as caught:
        scene.member.group_metadata()
    assert caught.value.retriable


def test_nobody_gets_the_metadata_of_the_next_membership_before_the_loss_is_told(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """With it, the broker would take offsets of what was lost in a transaction."""
    scene = scripted()
    scene.session.end(LostReason.FENCED)
    with pytest.raises(BrokerError, match="which no poll has returned yet") as caught:
        scene.member.group_metadata()
    assert caught.value.retriable
    assert scene.poll() == [FENCED]
    assert scene.member.group_metadata() is not None


def test_a_loss_that_comes_before_the_answer_keeps_the_metadata_of_the_group_back(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """The client joins again by itself, so the answer is of its next generation."""
    scene = scripted()
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
def test_a_member_whose_next_client_cannot_be_made_answers_no_question(
    scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    """It is not closed: the same question may be answered later."""
    scene = scripted()

    def failing(_config: object) -> confluent_kafka.Consumer:
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG))

    monkeypatch.setattr(confluent_kafka, "Consumer", failing)
    scene.session.end(LostReason.FENCED)
    with pytest.raises(BrokerError, match="membership has ended") as caught:
        ask(scene, question)
    assert caught.value.retriable


def test_what_nobody_waits_for_leaves_nothing_behind(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """A consumer that reads never waits for its member, and would grow with each event."""
    scene = scripted()
    for _ in range(3):
        scene.told.clear()
        scene.member.commit_async({P0: OffsetAndMetadata(1)})
        scene.until(lambda: scene.told, "the answer")
    assert scene.session._notifications.qsize() == 1


def test_no_event_is_lost_to_a_signal_handler_that_raises(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """Ctrl-C comes at any moment; a revoke that nobody heard of would be held to its limit."""
    scene = scripted()

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


def test_a_release_that_fails_ends_the_membership(
    scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the outcome of a release.

    The hold would stay, without a word, until `max.poll.interval.ms` is over.
    """
    scene = scripted()
    scene.ask_for(P1)
    scene.until(lambda: scene.member.held, "the request")

    def fail(*_: object, **__: object) -> None:
        msg = "closed"
        raise RuntimeError(msg)

    monkeypatch.setattr(session_module, "unassign", fail)
    scene.member.release()
    assert lost(scene) == [PartitionsLost((P0,), LostReason.SESSION)]


def test_a_commit_of_a_wrong_value_is_refused_and_blocks_no_other(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """The member would otherwise wait for this commit without end.

    The commit never reached the broker, and nobody answers it.
    """
    scene = scripted()
    wrong: Any = {P0: 5}
    with pytest.raises(
        TypeError, match="orders-0 must be an OffsetAndMetadata with the next offset, not 5"
    ):
        scene.member.commit_async(wrong)
    assert scene.member.settle(0)
    assert scene.member.commit({P0: OffsetAndMetadata(5)}).committed == {P0}
    assert scene.client.asked == [[(0, 5, "")]]


def test_commits_are_made_while_a_revoke_is_held(scripted: Callable[..., ScriptedMember]) -> None:
    """Of what is held and of what is kept; the client waits for its callback all the time."""
    scene = scripted()
    scene.ask_for(P1)
    assert scene.member.commit({P0: OffsetAndMetadata(1), P1: OffsetAndMetadata(2)}).committed == {
        P0,
        P1,
    }
    assert [(0, 1, ""), (1, 2, "")] in scene.client.asked
    assert scene.session.hold is not None


def test_a_commit_that_was_asked_for_before_a_release_is_stored_before_it(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """Afterwards it would overwrite what the next owner has committed."""
    scene = scripted()
    scene.ask_for(P1)
    scene.until(lambda: scene.member.held, "the revoke to be told")
    scene.client.may_answer.clear()
    scene.member.commit_async({P1: OffsetAndMetadata(7)})
    scene.member.release()
    assert scene.client.unassigned == []
    scene.client.may_answer.set()
    scene.until(lambda: scene.client.unassigned, "the release")
    assert scene.client.asked[-1] == [(1, 7, "")]
    assert scene.member.assignment() == {P0}


def test_a_commit_for_an_earlier_ownership_is_not_sent(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """The partition has gone and come back, and whoever commits has heard of neither."""
    scene = scripted()
    scene.lose(P0)
    scene.grant(P0)
    result = scene.member.commit({P0: OffsetAndMetadata(1), P1: OffsetAndMetadata(1)})
    assert isinstance(result.failed[P0], PartitionLostError)
    assert scene.client.asked == [[(1, 1, "")]]
    assert scene.member.committed([P1], 1.0) == {P1: None}
    again = scene.member.commit({P0: OffsetAndMetadata(1)})
    assert isinstance(again.failed[P0], PartitionLostError), "still nobody was told"
    assert [type(event) for event in scene.poll()] == [PartitionsLost, PartitionsAssigned]
    assert scene.member.commit({P0: OffsetAndMetadata(2)}).committed == {P0}


def test_nobody_waits_for_a_probe(scripted: Callable[..., ScriptedMember]) -> None:
    """A coordinator that is away must not stop whoever reads the retained partitions."""
    scene = scripted()
    scene.client.may_answer.clear()
    scene.ask_for(P1)
    probed(scene)
    scene.until(lambda: scene.client.asked, "the probe's commit")
    assert scene.poll() == []
    scene.member.release()
    assert scene.member.assignment() == {P0}
    scene.client.may_answer.set()
    scene.until(lambda: scene.client.unassigned, "the release")


def test_a_probe_stores_nothing(scripted: Callable[..., ScriptedMember]) -> None:
    """A transaction may have moved the offset since the probe read it.

    If the probe wrote it back, records would be processed again.
    """
    scene = scripted()
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
def test_a_probe_finds_a_member_that_was_thrown_out(
    scripted: Callable[..., ScriptedMember], code: int
) -> None:
    """The broker looks at the member before it looks at the metadata."""
    scene = scripted()
    scene.client.probe_answer = code
    scene.ask_for(P1)
    assert lost(scene) == [FENCED]


def test_the_callback_of_the_user_is_not_called_for_probes(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """It would take the refusal for one of its own commits. It is called in the caller's thread."""
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


def test_a_broker_that_stores_a_probe_gets_no_other_and_the_own_metadata_back(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """A limit of 32,000 bytes can be configured; a claim must not be gone for it."""
    scene = scripted()
    scene.client.stored = {P0: CLAIMS}
    scene.client.probe_answer = None
    assert scene.member.commit({P0: CLAIMS}).committed == {P0}
    scene.ask_for(P1)
    probed(scene, 3)
    assert [request[0][2][:6] for request in scene.client.asked] == ["claims", "------", "claims"]
    assert scene.session.end_reason is None


def test_what_an_earlier_owner_had_committed_comes_back_as_well(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """Claims that a member has adopted and not written itself yet."""
    scene = scripted()
    scene.client.stored = {P0: CLAIMS}
    scene.client.probe_answer = None
    scene.ask_for(P1)
    probed(scene, 2)
    assert scene.client.asked[-1] == [(0, 5, "claims")]


def test_a_moved_offset_of_a_held_partition_is_a_sign_and_of_a_retained_one_is_not(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """Only this member can own what it retains, so this member's user has moved that offset."""
    scene = scripted()
    scene.client.stored = {P0: OffsetAndMetadata(1), P1: OffsetAndMetadata(1)}
    scene.ask_for(P1)
    probed(scene)
    scene.client.stored = {P0: OffsetAndMetadata(2), P1: OffsetAndMetadata(1)}
    probed(scene, 2)
    assert scene.session.end_reason is None
    scene.client.stored = {P0: OffsetAndMetadata(2), P1: OffsetAndMetadata(2)}
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.SUPERSEDED)]


def test_once_transactions_may_commit_a_moved_offset_is_no_sign(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """The user's producer has moved it, in the name of this member."""
    scene = scripted()
    scene.member.group_metadata()
    scene.ask_for(P1)
    for offset in range(4):
        scene.client.stored = dict.fromkeys((P0, P1), OffsetAndMetadata(offset))
        probed(scene)
    assert scene.session.end_reason is None


def test_what_was_committed_in_an_earlier_ownership_is_no_sign(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """Another owner has gone on from there, as it should."""
    scene = scripted()
    scene.member.commit({P1: OffsetAndMetadata(1)})
    scene.client.stored = {P1: OffsetAndMetadata(9)}
    scene.lose(P1)
    scene.grant(P1)
    scene.ask_for(P1)
    probed(scene, 2)
    assert scene.session.end_reason is None


def test_offsets_that_are_gone_are_no_sign_of_another_member(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """Kafka deletes them with their topic."""
    scene = scripted()
    assert scene.member.commit({P1: OffsetAndMetadata(1)}).committed == {P1}
    scene.ask_for(P1)
    probed(scene, 2)
    assert scene.session.end_reason is None


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize(
    "refusal", [KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED]
)
def test_a_probe_of_a_refused_topic_is_followed_by_one_of_another_topic(
    scripted: Callable[..., ScriptedMember], refusal: int, *, is_read: bool
) -> None:
    """The broker refuses the topic before it looks at the member."""
    first, last = TopicPartition("a", 7), TopicPartition("z", 8)
    scene = scripted()
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


def test_a_revoke_that_was_queued_before_the_session_ended_is_a_loss(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """In the classic protocol, the client calls back for a revoke then (librdkafka#5604)."""
    scene = scripted()
    scene.client.stored = KafkaError._TIMED_OUT

    def revoke_late() -> None:
        scene.client.id = ""
        scene.session._on_revoke(
            scene.client, [confluent_kafka.TopicPartition(P1.topic, P1.partition)]
        )

    scene.client.script.put(revoke_late)
    assert lost(scene) == [FENCED]


def test_a_hold_of_refused_topics_alone_goes_on_without_probes(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """Each of them costs the broker a refusal, and none would say anything of the member."""
    scene = scripted()
    scene.client.probe_answer = KafkaError.UNKNOWN_TOPIC_OR_PART
    scene.ask_for(P1)
    probed(scene, 4)
    assert len(scene.client.asked) == 1
    assert scene.session.end_reason is None


def test_a_partition_in_an_open_transaction_is_probed_after_its_end(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """The broker refuses neither the partition nor its topic."""
    scene = scripted()
    scene.client.kept_back = frozenset({P0, P1})
    scene.ask_for(P1)
    probed(scene, 8)
    assert scene.client.asked == []
    scene.client.kept_back = frozenset()
    scene.until(lambda: scene.client.asked, "a probe")
    assert scene.session.end_reason is None


def test_a_probe_without_an_answer_is_no_sign(scripted: Callable[..., ScriptedMember]) -> None:
    """A broker that is away says nothing about the member."""
    scene = scripted()
    scene.client.stored = KafkaError._TIMED_OUT
    scene.ask_for(P1)
    probed(scene, 2)
    assert scene.session.end_reason is None
    assert scene.client.asked == []


def test_a_refused_release_is_told_as_a_loss(scripted: Callable[..., ScriptedMember]) -> None:
    """Another rebalance was faster.

    Raised, it would end the caller; ignored, both would believe to own the partition.
    """
    scene = scripted()
    scene.ask_for(P1)
    scene.until(lambda: scene.member.held, "the revoke to be told")
    scene.session.consumer.unassign()
    scene.member.release()
    assert lost(scene) == [PartitionsLost((P0,), LostReason.SUPERSEDED)]


def test_a_membership_that_ends_in_a_hold_leaves_the_group_before_it_gives_anything_up(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """A client that has unsubscribed is granted nothing that a late unassign could give away."""
    scene = scripted()
    scene.client.probe_answer = KafkaError.UNKNOWN_MEMBER_ID
    scene.ask_for(P1)
    assert lost(scene) == [FENCED]
    scene.until(lambda: scene.client.is_closed, "the old client to leave")
    assert scene.client.calls[:2] == ["unsubscribe", "unassign"]


def test_what_a_client_tells_after_the_end_of_its_membership_is_not_told(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """The client hears of its loss when it leaves the callback of its hold.

    By then, the member has told all partitions as lost, once.
    """
    scene = scripted()

    def end_and_lose() -> Message | None:
        scene.session.end(LostReason.FENCED)
        scene.session._on_lost(scene.client, scene.client.assignment())
        return None

    scene.client.script.put(end_and_lose)
    assert lost(scene) == [FENCED]


def test_leaving_completes_what_is_held(scripted: Callable[..., ScriptedMember]) -> None:
    """The client would otherwise wait for its unassign, and the group for the client."""
    scene = scripted()
    scene.ask_for(P1)
    scene.member.close(5.0)
    assert scene.client.is_closed
    assert [1] in scene.client.unassigned


def test_a_caller_that_stops_polling_loses_everything(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """The thread lives on without it, and would keep partitions that nobody works on."""
    clock = ManualClock()
    scene = scripted(clock)
    scene.member.subscribe(["orders"])
    scene.poll()
    clock.advance(scene.session._settings.max_poll_interval_s + 0.1)
    wait_until(lambda: scene.session.end_reason, timeout_s=10, what="the session to end")
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.SESSION)]


def test_a_hold_that_is_not_released_in_time_is_lost(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """At the very time at which a broker with the consumer protocol ends it."""
    clock = ManualClock()
    scene = scripted(clock)
    scene.ask_for(P1)
    clock.advance(scene.session._settings.max_poll_interval_s - 0.1)
    scene.poll()
    assert scene.session.end_reason is None
    clock.advance(0.2)
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.EXPIRED)]


def test_a_hold_whose_thread_waits_for_a_broker_is_lost_in_time_as_well(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """A frozen broker answers no commit for minutes, and the caller must hear of its loss."""
    clock = ManualClock()
    scene = scripted(clock)
    scene.ask_for(P1)
    scene.until(lambda: scene.member.held, "the revoke to be told")
    scene.client.may_answer.clear()
    ticket = scene.member.commit_async({P1: OffsetAndMetadata(7)})
    scene.until(
        lambda: scene.client.asked and scene.client.asked[-1] == [(1, 7, "")],
        "the commit to be on its way",
    )
    clock.advance(scene.session._settings.max_poll_interval_s + 1.1)
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.EXPIRED)]
    (answer,) = [event for event in scene.told if isinstance(event, CommitAnswered)]
    assert answer.ticket == ticket
    assert "not known whether it was stored" in str(answer.result.failed[P1])


def test_a_failure_of_the_thread_is_told_as_a_loss(
    scripted: Callable[..., ScriptedMember], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody would take part in the group for the caller any more, and it would not know."""
    scene = scripted()

    def fail() -> Message | None:
        msg = "a defect"
        raise RuntimeError(msg)

    scene.client.script.put(fail)
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.SESSION)]
    assert "a defect" in caplog.text
    assert len(scene.clients) == 2, "it joins anew"


def test_a_loss_is_told_before_the_old_client_has_left(
    scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client takes seconds to leave while its broker is away.

    The work on lost partitions must stop at once.
    """
    may_leave = threading.Event()

    def slow(client: Any) -> None:  # noqa: ANN401 - the client
        assert may_leave.wait(10)
        leave.leave(client)

    monkeypatch.setattr(session_module, "leave", slow)
    scene = scripted()
    scene.session.end(LostReason.FENCED)
    assert scene.poll() == [FENCED]
    assert scene.session.is_leaving
    may_leave.set()
    scene.member.close(5.0)
    assert not scene.session.is_leaving


def test_a_close_may_wait_for_the_leave_without_an_end(
    scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own waits take no time-out that is infinite."""
    scene = scripted()
    waits: list[bool] = []

    def wait(timeout_s: float) -> None:
        waits.append(threading.Lock().acquire(timeout=timeout_s))

    monkeypatch.setattr(scene.session._life, "result", wait)
    scene.member.close(math.inf)
    assert waits == [True]


@pytest.mark.parametrize("callback", ["on_commit", "stats_cb", "error_cb", "throttle_cb"])
def test_what_a_callback_of_the_settings_raises_interrupts_nothing(
    scripted: Callable[..., ScriptedMember], callback: str
) -> None:
    """The client would raise the error out of any call.

    A release would be lost, and a close would leave a member behind.
    """
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


def test_a_poll_inside_of_a_callback_of_the_settings_is_refused(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """It would tell events before those that this poll has taken."""
    refused: list[str] = []

    def poll(_raw: str) -> None:
        try:
            scene.member.poll(0)
        except IllegalStateError as problem:
            refused.append(str(problem))

    scene = scripted(stats_cb=poll)
    scene.do(lambda: scene.session._on_statistics("{}"))
    scene.until(lambda: refused, "the refusal")
    assert "inside a callback" in refused[0]


def test_a_commit_that_cannot_be_waited_for_in_a_callback_is_not_sent(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """Refused and stored all the same, it would be taken for one that was not made."""
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
    assert "a commit with a time-out inside a callback" in refused[0]
    assert scene.client.asked == []


def test_a_topic_that_is_missing_is_told_once_until_it_was_there(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """In classic, the client repeats the error with each rejoin and each look at the cluster.

    A poll that always raises reads nothing.
    """
    scene = scripted()

    def missing() -> list[object]:
        for _ in range(3):
            scene.do(lambda: trouble(KafkaError.UNKNOWN_TOPIC_OR_PART, "oders"))
        return [event for event in scene.poll() if isinstance(event, RequestFailed)]

    assert [str(event).count("create the topic") for event in missing()] == [1]
    assert missing() == []
    scene.grant(TopicPartition("oders", 0))
    assert len(missing()) == 1


def test_other_errors_of_a_topic_are_told_each_time(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """Only that it is missing is no news."""
    scene = scripted()
    for _ in range(2):
        scene.do(lambda: trouble(KafkaError.TOPIC_AUTHORIZATION_FAILED, "orders"))
    assert len([event for event in scene.poll() if isinstance(event, RequestFailed)]) == 2


def test_a_client_that_is_broken_is_told_once_with_the_loss_and_replaced_later(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """It does nothing any more.

    Polls that raised without a wait kept a core busy; and the next client may be refused likewise.
    """
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


def test_a_fatal_answer_to_a_probe_ends_the_ownership(
    scripted: Callable[..., ScriptedMember],
) -> None:
    """In a hold the client calls nobody back, and the group has given the partitions away."""
    scene = scripted()
    scene.client.stored = KafkaError._FATAL
    scene.ask_for(P1)
    assert lost(scene) == [PartitionsLost((P0, P1), LostReason.SESSION)]
    assert isinstance(scene.told[-1], RequestFailed)


def test_a_client_that_breaks_ends_a_poll_that_waits(
    scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poll does not look again by itself for a while."""
    monkeypatch.setattr("dagster_rebalance.kafka.member.member._WAIT_SLICE_S", 10 * LIMIT_S)
    scene, told = scripted(), queue.SimpleQueue[list["MemberEvent"]]()
    poll = partial(scene.member.poll, 10 * LIMIT_S)
    threading.Thread(target=lambda: told.put(poll()), daemon=True).start()
    scene.do(partial(trouble, KafkaError._FATAL))
    assert isinstance(told.get(timeout=LIMIT_S)[-1], RequestFailed)


def test_a_classic_member_looks_for_no_topics_before_the_rebalance_of_its_release_is_over(
    scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it found would let the client rejoin in the middle of it."""
    scene, looked = scripted(**{"group.protocol": "classic"}), []
    scene.ask_for(P1)
    scene.until(lambda: scene.member.held, "the revoke to be told")
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
