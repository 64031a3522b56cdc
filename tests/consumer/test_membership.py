"""What a member makes of what its client tells, without a broker: losses, probes, releases and leaving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.consumer.events import (
    CallbackFailed,
    HoldSuperseded,
    LostReason,
    PartitionsLost,
    RequestFailed,
)
from dagster_rebalance.core.errors import RebalanceInProgressError
from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition
from tests.consumer.clients import ScriptedMember, trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from confluent_kafka import Message

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
LATE = KafkaError._MAX_POLL_EXCEEDED
REFRESHED = {"group.protocol": "classic", "topic.metadata.refresh.interval.ms": 500}


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedMember]]:
    """Makes members that own two partitions; they have left when the test ends."""
    made: list[ScriptedMember] = []

    def make(**settings: object) -> ScriptedMember:
        made.append(ScriptedMember(settings))
        made[-1].grant(P0, P1)
        made[-1].session.take()
        return made[-1]

    yield make
    for each in made:
        each.close()


def committed(scene: ScriptedMember, answer: Callable[[Collection[TopicPartition]], dict[TopicPartition, Any]]) -> None:
    """Let probes read what the test says."""

    def read(partitions: Collection[TopicPartition], timeout_s: float) -> dict[TopicPartition, Any]:
        assert timeout_s <= 0.5, "a probe must not stop the thread that reads"
        return answer(partitions)

    scene.session.commits.read = read  # type: ignore[method-assign]


def test_a_poll_that_comes_too_late_tells_the_loss_at_once(scripted: Callable[..., ScriptedMember]) -> None:
    """The client queues the error before the callback, and records of somebody else's partitions would be returned between."""
    scene = scripted()

    def lose() -> Message | None:
        scene.lose(P0, P1)
        return None

    scene.client.script = [lambda: trouble(LATE), lose]
    assert scene.member.poll(0) == [PartitionsLost((P0, P1), LostReason.SESSION)]


def test_an_unknown_member_hears_of_its_loss_in_the_next_poll(scripted: Callable[..., ScriptedMember]) -> None:
    """The broker has given its partitions away, and the client tells so some polls later."""
    scene = scripted()
    ticket = scene.member.commit_async({P0: OffsetAndMetadata(1)})
    scene.answer(KafkaError.UNKNOWN_MEMBER_ID)
    answered, lost = scene.member.poll(0)
    assert getattr(answered, "ticket", None) == ticket
    assert lost == PartitionsLost((P0, P1), LostReason.FENCED)


def test_a_member_that_a_waited_for_commit_finds_unknown_hears_of_its_loss(scripted: Callable[..., ScriptedMember]) -> None:
    """The same, where the answer is the result of the call."""
    scene = scripted()
    scene.client.refuses = KafkaError.UNKNOWN_MEMBER_ID
    assert set(scene.member.commit({P0: OffsetAndMetadata(1)}).failed) == {P0}
    assert scene.member.poll(0) == [PartitionsLost((P0, P1), LostReason.FENCED)]


def test_an_answer_to_an_earlier_membership_does_not_end_the_present_one(scripted: Callable[..., ScriptedMember]) -> None:
    """The client has told the loss and joined again, and only then comes the answer."""
    scene = scripted()
    scene.member.commit_async({P0: OffsetAndMetadata(1)})
    scene.lose(P0, P1)
    scene.answer(KafkaError.UNKNOWN_MEMBER_ID)
    assert scene.session.ended is None


def test_a_stale_generation_outside_of_a_hold_is_not_the_end(scripted: Callable[..., ScriptedMember]) -> None:
    """The new one is on its way to the client."""
    scene = scripted()
    scene.member.commit_async({P0: OffsetAndMetadata(1)})
    scene.answer(KafkaError.ILLEGAL_GENERATION)
    (answered,) = scene.member.poll(0)
    assert isinstance(getattr(answered, "result").failed[P0], RebalanceInProgressError)  # noqa: B009 - one of a union
    assert scene.session.ended is None


def test_a_commit_of_a_wrong_value_is_refused_and_blocks_no_other(scripted: Callable[..., ScriptedMember]) -> None:
    """It would otherwise be waited for without end: it never reached the broker, and nobody answers it."""
    scene = scripted()
    wrong: Any = {P0: 5}
    with pytest.raises(TypeError, match="orders-0 must be an OffsetAndMetadata with the next offset, not 5"):
        scene.member.commit_async(wrong)
    assert scene.member.settle(0)
    scene.member.commit_async({P0: OffsetAndMetadata(5)})
    assert [tp.offset for tp in scene.client.asked[-1]] == [5]
    scene.answer()


def test_a_probe_stores_nothing(scripted: Callable[..., ScriptedMember]) -> None:
    """What was read may have moved since, by a transaction: writing it back would do records again."""
    scene = scripted()
    scene.ask_for(P1)
    committed(scene, lambda asked: dict.fromkeys(asked, OffsetAndMetadata(5, "claims")))
    scene.member.poll(0)
    (request,) = scene.client.asked
    assert [(tp.partition, tp.offset, len(tp.metadata or "")) for tp in request] == [(0, 5, 32_000)]


def test_one_probe_is_on_its_way_at_a_time_and_nothing_waits_for_it(scripted: Callable[..., ScriptedMember]) -> None:
    """A coordinator that is away must not stop the thread that reads the retained partitions, nor a release."""
    scene = scripted()
    scene.ask_for(P1)
    committed(scene, lambda asked: dict.fromkeys(asked, None))
    for _ in range(3):
        scene.member.poll(0)
    assert len(scene.client.asked) == 1
    assert scene.member.settle(0)
    scene.answer(KafkaError.OFFSET_METADATA_TOO_LARGE)
    scene.member.poll(0)
    assert len(scene.client.asked) == 2
    scene.member.release()
    assert scene.member.assignment() == {P0}


@pytest.mark.parametrize("code", [KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION, KafkaError.STALE_MEMBER_EPOCH])
def test_a_probe_finds_a_member_that_was_thrown_out(scripted: Callable[..., ScriptedMember], code: int) -> None:
    """The broker looks at the member before it looks at the metadata."""
    scene = scripted()
    scene.ask_for(P1)
    committed(scene, lambda asked: dict.fromkeys(asked, None))
    scene.member.poll(0)
    scene.answer(code)
    assert scene.member.poll(0)[-1] == PartitionsLost((P0, P1), LostReason.FENCED)


def test_the_answer_to_a_probe_of_an_earlier_hold_says_nothing_about_the_next(scripted: Callable[..., ScriptedMember]) -> None:
    """Its generation ended with that hold."""
    scene = scripted()
    scene.ask_for(P1)
    committed(scene, lambda asked: dict.fromkeys(asked, None))
    scene.member.poll(0)
    scene.member.release()
    scene.ask_for(P0)
    scene.answer(KafkaError.ILLEGAL_GENERATION)
    assert scene.session.ended is None


def test_the_callback_of_the_user_is_not_called_for_probes(scripted: Callable[..., ScriptedMember]) -> None:
    """It would take the refusal for one of its own commits."""
    seen: list[int] = []
    scene = scripted(on_commit=lambda _error, partitions: seen.append(len(partitions)))
    scene.ask_for(P1)
    committed(scene, lambda asked: dict.fromkeys(asked, None))
    scene.member.poll(0)
    scene.answer(KafkaError.OFFSET_METADATA_TOO_LARGE)
    assert seen == []
    scene.member.commit_async({P0: OffsetAndMetadata(1)})
    scene.answer()
    assert seen == [1]


def test_a_broker_that_stores_a_probe_gets_no_other_and_the_own_metadata_back(scripted: Callable[..., ScriptedMember]) -> None:
    """A limit of 32,000 bytes can be configured; a claim must not be gone for it."""
    scene = scripted()
    scene.member.commit_async({P0: OffsetAndMetadata(5, "claims")})
    scene.answer()
    scene.ask_for(P1)
    committed(scene, lambda asked: dict.fromkeys(asked, OffsetAndMetadata(5, "claims")))
    scene.member.poll(0)
    scene.answer()
    assert [(tp.partition, tp.offset, tp.metadata) for tp in scene.client.asked[-1]] == [(0, 5, "claims")]
    scene.answer()
    count = len(scene.client.asked)
    scene.member.poll(0)
    assert len(scene.client.asked) == count
    assert scene.session.ended is None


def test_what_an_earlier_owner_had_committed_comes_back_as_well(scripted: Callable[..., ScriptedMember]) -> None:
    """Claims that a member has adopted and not written itself yet."""
    scene = scripted()
    scene.ask_for(P1)
    committed(scene, lambda asked: dict.fromkeys(asked, OffsetAndMetadata(5, "claims")))
    scene.member.poll(0)
    scene.answer()
    assert [(tp.partition, tp.offset, tp.metadata) for tp in scene.client.asked[-1]] == [(0, 5, "claims")]


def test_a_newer_commit_that_is_on_its_way_is_not_undone_by_what_a_probe_has_found(scripted: Callable[..., ScriptedMember]) -> None:
    """It overwrites the probe by itself."""
    scene = scripted()
    scene.ask_for(P1)
    committed(scene, lambda asked: dict.fromkeys(asked, OffsetAndMetadata(5, "claims")))
    scene.member.poll(0)
    scene.member.commit_async({P0: OffsetAndMetadata(6, "newer")})
    scene.answer()
    assert [(tp.offset, tp.metadata) for request in scene.client.asked[1:] for tp in request] == [(6, "newer")]


def test_a_moved_offset_of_a_held_partition_is_a_sign_and_of_a_retained_one_is_not(scripted: Callable[..., ScriptedMember]) -> None:
    """Nobody but this member can own what it retains, so it is this member's user who has moved it."""
    scene = scripted()
    scene.ask_for(P1)
    offsets = {P0: OffsetAndMetadata(1), P1: OffsetAndMetadata(1)}
    committed(scene, lambda asked: {tp: offsets[tp] for tp in asked})
    scene.member.poll(0)
    offsets[P0] = OffsetAndMetadata(2)
    scene.member.poll(0)
    assert scene.session.ended is None
    offsets[P1] = OffsetAndMetadata(2)
    assert HoldSuperseded((P1,)) in scene.member.poll(0)


def test_once_transactions_may_commit_a_moved_offset_is_no_sign(scripted: Callable[..., ScriptedMember]) -> None:
    """The user's producer has moved it, in the name of this member."""
    scene = scripted()
    scene.member.group_metadata()
    scene.ask_for(P1)
    offsets = iter(range(10))
    committed(scene, lambda asked: dict.fromkeys(asked, OffsetAndMetadata(next(offsets))))
    for _ in range(3):
        scene.member.poll(0)
    assert scene.session.ended is None


def test_what_was_committed_in_an_earlier_ownership_is_no_sign(scripted: Callable[..., ScriptedMember]) -> None:
    """Another owner has gone on from there, as it should."""
    scene = scripted()
    scene.member.commit_async({P1: OffsetAndMetadata(1)})
    scene.answer()
    scene.ask_for(P1)
    scene.member.release()
    scene.grant(P1)
    scene.ask_for(P1)
    committed(scene, lambda asked: dict.fromkeys(asked, OffsetAndMetadata(9)))
    scene.member.poll(0)
    assert scene.session.ended is None


def test_a_probe_without_an_answer_is_no_sign(scripted: Callable[..., ScriptedMember]) -> None:
    """A broker that is away says nothing about the member."""
    scene = scripted()
    scene.ask_for(P1)

    def no_answer(_partitions: object) -> dict[TopicPartition, Any]:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    committed(scene, no_answer)
    scene.member.poll(0)
    assert scene.session.ended is None
    assert scene.client.asked == []


def test_a_release_that_another_rebalance_has_overtaken_gives_nothing_away(scripted: Callable[..., ScriptedMember]) -> None:
    """The statistics tell it while the release is served: what was granted since must not be unassigned."""
    scene = scripted(**REFRESHED)
    scene.ask_for(P1)

    def report() -> None:
        scene.report("wait-join")

    scene.client.script = [report, report]
    scene.member.release()
    assert scene.client.unassigned == []
    told = scene.member.poll(0)
    assert told[-2:] == [HoldSuperseded((P1,)), PartitionsLost((P0, P1), LostReason.SUPERSEDED)]


def test_a_release_of_a_hold_that_stands_is_sent(scripted: Callable[..., ScriptedMember]) -> None:
    """The other outcome of the same wait."""
    scene = scripted(**REFRESHED)
    scene.ask_for(P1)

    def report() -> None:
        scene.report("wait-unassign-call")

    scene.client.script = [report, report]
    scene.member.release()
    assert scene.client.unassigned == [[1]]
    assert scene.member.assignment() == {P0}


def test_leaving_completes_what_is_held(scripted: Callable[..., ScriptedMember]) -> None:
    """The client would otherwise wait for its unassign, and the group for the client."""
    scene = scripted()
    scene.ask_for(P1)
    scene.member.close(5.0)
    assert [1] in scene.client.unassigned


def test_leaving_sends_no_unassign_for_a_hold_that_was_overtaken(scripted: Callable[..., ScriptedMember]) -> None:
    """The client would apply it to what it was granted since."""
    scene = scripted()
    scene.ask_for(P1)
    scene.session.ended = LostReason.SUPERSEDED
    scene.member.poll(0)
    scene.member.close(5.0)
    assert scene.client.unassigned == []


def test_a_loss_is_told_before_the_old_client_has_left(scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a broker that is away a client takes seconds to leave, and the work on lost partitions must stop now."""
    scene = scripted()
    told: list[object] = []
    left_before: list[bool] = []
    leave = scene.session._leave

    def slow() -> None:
        while not told:
            pass
        left_before.append(True)
        leave()

    monkeypatch.setattr(scene.session, "_leave", slow)
    scene.session.ended = LostReason.FENCED
    told += scene.member.poll(0)
    assert told == [PartitionsLost((P0, P1), LostReason.FENCED)]
    scene.member.close(5.0)
    assert left_before == [True]
    assert not scene.session.is_leaving


@pytest.mark.parametrize("callback", ["on_commit", "stats_cb", "error_cb", "throttle_cb"])
def test_what_a_callback_of_the_settings_raises_interrupts_nothing(scripted: Callable[..., ScriptedMember], callback: str) -> None:
    """The client raises it out of any call: a release would be lost, and a close would leave a member behind."""
    problem = ValueError("a bug of the user's")

    def fail(*_arguments: object) -> None:
        raise problem

    scene = scripted(**{callback: fail})
    if callback == "on_commit":
        scene.member.commit_async({P0: OffsetAndMetadata(1)})
        scene.answer()
    elif callback == "stats_cb":
        scene.report("steady")
    elif callback == "error_cb":
        scene.session._on_error(KafkaError(KafkaError._TRANSPORT))
    else:
        scene.session._call_user("throttle_cb", None)
    assert CallbackFailed(problem) in scene.member.poll(0)
    assert CallbackFailed(problem) not in scene.member.poll(0)


def test_a_topic_that_is_missing_is_told_once_until_it_was_there(scripted: Callable[..., ScriptedMember]) -> None:
    """In classic the client says so with each rejoin and each look at the cluster; a poll that always raises reads nothing."""
    scene = scripted()

    def missing() -> list[object]:
        scene.client.script = [lambda: trouble(KafkaError.UNKNOWN_TOPIC_OR_PART, "oders")] * 3
        return [event for event in scene.member.poll(0) if isinstance(event, RequestFailed)]

    assert [str(event).count("create the topic") for event in missing()] == [1]
    assert missing() == []
    scene.grant(TopicPartition("oders", 0))
    assert len(missing()) == 1


def test_other_errors_of_a_topic_are_told_each_time(scripted: Callable[..., ScriptedMember]) -> None:
    """Only that it is missing is no news."""
    scene = scripted()
    scene.client.script = [lambda: trouble(KafkaError.TOPIC_AUTHORIZATION_FAILED, "orders")] * 2
    assert len([event for event in scene.member.poll(0) if isinstance(event, RequestFailed)]) == 2


def test_a_classic_member_looks_for_no_topics_before_the_rebalance_of_its_release_is_over(
    scripted: Callable[..., ScriptedMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it found would let the client rejoin in the middle of it."""
    scene, looked = scripted(**{"group.protocol": "classic"}), []
    monkeypatch.setattr("dagster_rebalance.consumer.discovery.Discovery.look", lambda *_: looked.append("looked"))
    scene.ask_for(P1)
    scene.member.poll(0)
    scene.member.release()
    scene.member.poll(0)
    assert not looked
    scene.grant()
    scene.member.poll(0)
    assert looked
