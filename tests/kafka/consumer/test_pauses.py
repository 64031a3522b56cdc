"""Pause marks in rebalances of a fake group: kept, cleared, or carried to the next owner."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.claims import Claim, StoredPartition, decode, encode
from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError, IllegalStateError
from dagster_rebalance.core.model.events import (
    LostReason,
    PartitionsAssigned,
    PartitionsLost,
    RevokeRequested,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.consumer.caller_commits import with_mark
from dagster_rebalance.kafka.group_ports import CommitAnswered, CommitResult
from dagster_rebalance.testing.fake_group import FakeGroup, FakeMember
from tests.kafka.consumers import (
    CONFIG,
    EVERYTHING,
    P0,
    P1,
    P2,
    P3,
    Listener,
    consumer_of,
    member_of,
    owner,
    poll,
)
from tests.kafka.fake_log import fake_log

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
    from dagster_rebalance.kafka.consumer.state import PauseMarksPolicy

    NewConsumer = Callable[[PauseMarksPolicy], RebalanceAwareConsumer]


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup({"orders": 4, "clicks": 1})


@pytest.fixture
def new(group: FakeGroup) -> NewConsumer:
    return lambda pause_marks: consumer_of(group, pause_marks=pause_marks)


@pytest.fixture
def blue(group: FakeGroup) -> RebalanceAwareConsumer:
    """A consumer that owns everything, and carries its marks."""
    return owner(group, pause_marks="carry")


def hand_over(blue: RebalanceAwareConsumer, green: RebalanceAwareConsumer) -> None:
    """P2 and P3 move from blue to green."""
    poll(green, blue, blue, green)
    assert green.assignment() == {P2, P3}


@pytest.fixture
def eager(group: FakeGroup) -> RebalanceAwareConsumer:
    """A consumer that clears marks, with a strategy that revokes everything in each rebalance."""
    strategy = {"group.protocol": "classic", "partition.assignment.strategy": "range"}
    consumer = owner(group, config={**CONFIG, **strategy}, pause_marks="clear")
    consumer.pause([P0, P2])
    return consumer


def test_eager_rebalance_clears_marks_of_partitions_that_do_not_return(
    eager: RebalanceAwareConsumer,
) -> None:
    """The marks of partitions that it revokes and assigns again stay."""
    eager._rebalances._apply(RevokeRequested(EVERYTHING), same_poll=False)
    eager._state.revokes.start_poll()
    eager._state.unassign(EVERYTHING)
    assert eager.paused() == {P0, P2}
    eager._rebalances._apply(PartitionsAssigned((P0, P1)), same_poll=False)
    assert eager.paused() == {P0}
    eager._rebalances._apply(PartitionsAssigned((P2, P3)), same_poll=False)
    assert eager.paused() == {P0}


def test_loss_clears_marks_with_an_eager_strategy(
    group: FakeGroup, eager: RebalanceAwareConsumer
) -> None:
    group.fence(member_of(eager))
    poll(eager)
    assert eager.get_lost_partitions() == set(EVERYTHING)
    assert not eager.paused()


def test_kept_marks_apply_when_partitions_return(new: NewConsumer) -> None:
    blue, green = new("keep"), new("keep")
    blue.poll(0.1)
    blue.pause([P0, P2])
    hand_over(blue, green)
    assert blue.paused() == {P0, P2}
    assert not green.paused()
    green.close()
    blue.poll(0.1)
    assert blue.assignment() == set(EVERYTHING)
    assert blue.paused() == {P0, P2}


def test_policy_clear_clears_marks_of_revoked_partitions(new: NewConsumer) -> None:
    """KAFKA-20385: "when partitions are revoked, any paused states ... are cleared"."""
    blue, green = new("clear"), new("clear")
    blue.poll(0.1)
    blue.pause([P0, P2])
    hand_over(blue, green)
    assert blue.paused() == {P0}


def test_policy_clear_clears_marks_of_lost_partitions(group: FakeGroup, new: NewConsumer) -> None:
    blue = new("clear")
    blue.poll(0.1)
    blue.pause([P0])
    group.fence(group.members[0])
    blue.poll(0.1)
    assert blue.get_lost_partitions() == set(EVERYTHING)
    assert not blue.paused()


def test_marks_of_topics_patterns_and_the_consumer_survive_any_rebalance(new: NewConsumer) -> None:
    blue, green = new("clear"), new("clear")
    blue.poll(0.1)
    blue.pause_topics(["orders"])
    hand_over(blue, green)
    green.close()
    blue.poll(0.1)
    assert blue.paused() == set(EVERYTHING)
    blue.resume_topics(["orders"])
    blue.pause_pattern(re.compile("ord.*"))
    assert blue.paused() == set(EVERYTHING)
    blue.resume_pattern(re.compile("ord.*"))
    assert not blue.paused()
    blue.pause_all()
    assert blue.paused() == set(EVERYTHING)
    blue.resume_all()
    assert not blue.paused()


def test_pause_of_a_partition_that_does_not_exist_yet_applies_later(
    group: FakeGroup, new: NewConsumer
) -> None:
    """The document on pausing: "No matter whether the consumer has assigned any" of them."""
    blue = new("keep")
    later = TopicPartition("orders", 5)
    blue.pause([P1, later])
    assert blue.paused() == {P1, later}
    blue.poll(0.1)
    group.add_partitions("orders", 6)
    blue.poll(0.1)
    assert later in blue.assignment()
    assert blue.paused() == {P1, later}


def test_pause_of_a_topic_that_is_not_subscribed_is_refused(new: NewConsumer) -> None:
    """The document on pausing: "Throws IllegalStateException if ... not currently subscribed"."""
    blue = new("keep")
    with pytest.raises(IllegalStateError, match="'clicks'"):
        blue.pause_topics(["orders", "clicks"])
    blue.poll(0.1)
    assert not blue.paused()
    blue.subscribe(re.compile("cli.*"))
    blue.pause_topics(["clicks"])


def test_held_revoke_and_pause_are_independent(new: NewConsumer) -> None:
    blue, green = new("keep"), new("keep")
    blue.poll(0.1)
    blue.pause([P0, P2])
    green.poll(0.1)
    blue.poll(0.1)
    assert blue.get_to_be_revoked_partitions() == {P2, P3}
    blue.delay_revoke([P2, P3])
    blue.resume([P2])
    assert blue.paused() == {P0}
    blue.pause([P3])
    blue.poll(0.1)
    assert blue.paused() == {P0, P3}


def test_carried_mark_pauses_the_partition_at_its_next_owner(
    group: FakeGroup, blue: RebalanceAwareConsumer, new: NewConsumer
) -> None:
    """The document on pausing: "the new consumer can continue to maintain the paused mark"."""
    group.committed[P2] = OffsetAndMetadata(7, "the user's")
    blue.pause([P0, P2])
    hand_over(blue, green := new("carry"))
    assert green.paused() == {P2}
    assert green.committed([P2]) == {P2: OffsetAndMetadata(7, "the user's")}
    assert blue.paused() == {P0}


def test_removed_mark_does_not_return_to_an_earlier_owner(
    group: FakeGroup, blue: RebalanceAwareConsumer, new: NewConsumer
) -> None:
    blue.pause([P2])
    hand_over(blue, green := new("carry"))
    green.resume([P2])
    green.close()
    blue.poll(0.1)
    assert blue.assignment() == set(EVERYTHING)
    assert not blue.paused()
    assert group.committed[P2] == OffsetAndMetadata(0)


@pytest.mark.parametrize("change_is_unanswered", [False, True])
@pytest.mark.parametrize("resumes", [True, False])
def test_mark_that_a_commit_has_changed_is_changed_back(
    group: FakeGroup, blue: RebalanceAwareConsumer, *, resumes: bool, change_is_unanswered: bool
) -> None:
    """The user changes a pause, a commit stores it, and the user changes it back."""
    if not resumes:
        blue.pause([P0])
        poll(blue)
    change, change_back = (blue.pause, blue.resume) if resumes else (blue.resume, blue.pause)
    change([P0])
    if change_is_unanswered:
        group.answers_commits = False
        blue.poll(0)
        change_back([P0])
        group.answers_commits = True
        group.clock.advance(5.0)
    else:
        blue.commit_sync({P0: OffsetAndMetadata(3)})
        change_back([P0])
    blue.poll(0)
    offset = 0 if change_is_unanswered else 3
    assert group.committed == {P0: OffsetAndMetadata(offset, "" if resumes else with_mark(""))}


def test_mark_that_a_commit_in_flight_changes_is_changed_back(
    group: FakeGroup, blue: RebalanceAwareConsumer
) -> None:
    """Its answer may arrive after that of a newer commit, and does not tell the stored mark."""
    blue.pause([P0])
    blue.commit_async({P0: OffsetAndMetadata(3)})
    blue.resume([P0])
    blue.commit_sync({P0: OffsetAndMetadata(4)})
    blue.poll(0)
    blue.pause([P0])
    blue.poll(0)
    assert group.committed == {P0: OffsetAndMetadata(4, with_mark(""))}


def test_stored_mark_is_not_stored_again(group: FakeGroup, blue: RebalanceAwareConsumer) -> None:
    blue.pause([P0])
    blue.commit_sync({P0: OffsetAndMetadata(3)})
    blue.poll(0)
    group.committed.clear()
    blue.poll(0)
    blue.commit_sync({P0: OffsetAndMetadata(4)})
    group.committed.clear()
    blue.poll(0)
    assert not group.committed


def test_carried_mark_survives_a_crash_after_the_next_poll(
    group: FakeGroup, blue: RebalanceAwareConsumer, new: NewConsumer
) -> None:
    blue.pause([P0])
    poll(blue)
    group.fence(group.members[0])
    green = new("carry")
    green.poll(0.1)
    assert green.paused() == {P0}


def test_mark_and_claims_share_the_metadata_of_a_commit(
    group: FakeGroup, blue: RebalanceAwareConsumer, new: NewConsumer
) -> None:
    blue.pause([P2])
    claimed = StoredPartition(3, (Claim(9, "batch-1"),))
    blue.commit_sync({P2: encode(claimed)})
    hand_over(blue, green := new("carry"))
    assert green.paused() == {P2}
    found = green.committed([P2])[P2]
    assert found is not None
    assert decode(found) == claimed
    assert group.committed[P2] != found


def test_group_metadata_is_refused_with_carried_marks(new: NewConsumer) -> None:
    """Storing a mark commits the last offset again, which would undo a transaction."""
    assert new("keep").group_metadata().group_id == "etl"
    with pytest.raises(IllegalStateError, match="use pause_marks='keep' or 'clear'"):
        new("carry").group_metadata()


def test_carried_mark_is_ignored_by_a_consumer_with_another_policy(
    group: FakeGroup, blue: RebalanceAwareConsumer, new: NewConsumer
) -> None:
    """It is not part of the metadata, and the next commit removes it."""
    blue.pause([P2])
    hand_over(blue, green := new("keep"))
    assert not green.paused()
    assert green.committed([P2]) == {P2: OffsetAndMetadata(0)}
    green.commit_sync({P2: OffsetAndMetadata(1)})
    assert group.committed[P2] == OffsetAndMetadata(1)


class SlowMember(FakeMember):
    """A member whose coordinator answers `committed` late, with an error, or at the timeout."""

    def __init__(self, group: FakeGroup) -> None:
        super().__init__(group)
        self.limits: list[float] = []
        self.takes_s: float | None = 0.0
        """None for a coordinator that does not answer."""

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        self.limits.append(timeout_s)
        self._group.clock.advance(timeout_s if self.takes_s is None else self.takes_s)
        if self.takes_s is None:
            msg = "the coordinator is away"
            raise BrokerError(msg, retriable=True)
        return super().committed(partitions, timeout_s)


def test_mark_that_cannot_be_read_yet_is_read_by_a_later_poll(
    group: FakeGroup, blue: RebalanceAwareConsumer
) -> None:
    """Until then no record of its partition may be returned."""
    blue.pause([P0])
    blue.close()
    member = SlowMember(group)
    member.takes_s = None
    green = consumer_of(group, pause_marks="carry", member=member)
    poll(green)
    assert green.assignment() == set(EVERYTHING)
    assert not green.paused()
    member.takes_s = 0.0
    group.clock.advance(5.0)
    poll(green)
    assert green.paused() == {P0}


@pytest.fixture
def away(group: FakeGroup) -> tuple[SlowMember, RebalanceAwareConsumer]:
    """A consumer with an unstored mark, whose coordinator does not answer."""
    member = SlowMember(group)
    consumer = owner(group, pause_marks="carry", member=member)
    consumer.pause([P0])
    member.takes_s = None
    return member, consumer


def test_unavailable_coordinator_delays_polls_for_a_sixth_of_the_time(
    group: FakeGroup, away: tuple[SlowMember, RebalanceAwareConsumer]
) -> None:
    """An unstored mark must not slow down the records of the other partitions."""
    member, consumer = away
    began, waited = group.clock(), 0.0
    while group.clock() < began + 60:
        before = group.clock()
        consumer.poll(0)
        took_s = group.clock() - before
        assert took_s < 1.01
        waited += took_s
        group.clock.advance(0.05)
    assert waited < 12
    member.takes_s = 0.0
    group.clock.advance(5.0)
    consumer.poll(0)
    assert group.committed == {P0: OffsetAndMetadata(0, with_mark(""))}


def test_close_waits_for_marks_within_its_time_out(
    group: FakeGroup, away: tuple[SlowMember, RebalanceAwareConsumer]
) -> None:
    _, consumer = away
    before = group.clock()
    consumer.close(1.0)
    assert group.clock() - before == pytest.approx(1.0)


@pytest.mark.parametrize("answers", [False, True])
def test_poll_does_not_wait_for_the_commit_of_a_mark_during_an_outage(
    group: FakeGroup, blue: RebalanceAwareConsumer, *, answers: bool
) -> None:
    """The commit stays in flight."""
    blue.pause([P0])
    group.answers_commits = answers
    blue.poll(0)
    group.answers_commits = True
    blue.poll(0)
    assert group.committed == {P0: OffsetAndMetadata(0, with_mark(""))}


def test_mark_of_a_lost_partition_raises_no_error(
    group: FakeGroup, blue: RebalanceAwareConsumer
) -> None:
    blue.pause([P0])
    member_of(blue).deliver(PartitionsLost(EVERYTHING, LostReason.FENCED))
    blue.poll(0)
    assert blue.get_lost_partitions() == set(EVERYTHING)
    assert not group.committed


@pytest.mark.parametrize("reset", ["latest", "error"])
def test_mark_without_a_known_start_position_withholds_no_other_record(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch, reset: str
) -> None:
    """The mark is stored when the position is known."""
    fake_log(group, monkeypatch, {2: 3})
    group.committed = dict.fromkeys((P1, P2, P3), OffsetAndMetadata(0))
    group.silence(P0)
    consumer = consumer_of(
        group, config={**CONFIG, "auto.offset.reset": reset}, fetch=True, pause_marks="carry"
    )
    consumer.set_rebalance_listener(Listener(assigned=lambda _, view: view.pause([P0, P1])))
    read: list[int | None] = []
    for _ in range(3):
        with suppress(BrokerError):  # the fetcher reports that it cannot start
            read += [record.offset() for record in consumer.poll(0)]
    assert read == [0, 1, 2]
    assert group.committed[P1] == OffsetAndMetadata(0, with_mark(""))
    assert P0 not in group.committed
    group.silence()
    group.committed[P0] = OffsetAndMetadata(7)
    group.clock.advance(5.0)
    consumer.poll(0)
    assert group.committed[P0] == OffsetAndMetadata(7, with_mark(""))
    consumer.close()


@pytest.mark.parametrize("takes_s", [0.4, 0.7])
def test_no_request_for_marks_is_sent_with_too_little_time_left(
    group: FakeGroup, takes_s: float
) -> None:
    """The client treats a timeout below 0 as infinite."""
    member = SlowMember(group)
    consumer = owner(group, pause_marks="carry", member=member)
    consumer.pause([P0, P1])
    member.takes_s = takes_s
    consumer.poll(0)
    assert min(member.limits) >= 0.5


class FailingMember(FakeMember):
    """A member whose commits are refused for now."""

    def commit_async(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> int:
        ticket = super().commit_async(offsets)
        self._pending.clear()
        error = BrokerError("the coordinator is moving", retriable=True)
        self.deliver(
            CommitAnswered(ticket, CommitResult(frozenset(), dict.fromkeys(offsets, error)))
        )
        return ticket


def test_resume_of_a_mark_that_was_never_stored_commits_nothing(group: FakeGroup) -> None:
    """The user has committed nothing, and the position may be after unfinished records."""
    member = FailingMember(group)
    consumer = owner(group, pause_marks="carry", member=member)
    consumer.pause([P0])
    consumer.poll(0)
    member.commit_async = super(FailingMember, member).commit_async  # type: ignore[method-assign]
    consumer.resume([P0])
    group.clock.advance(5.0)
    consumer.poll(0)
    assert not group.committed


def test_unknown_policy_is_refused(group: FakeGroup) -> None:
    with pytest.raises(ConfigurationError, match="'keep', 'clear' or 'carry'"):
        consumer_of(group, pause_marks="forget")
