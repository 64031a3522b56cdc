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
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.consumer.listener import RebalanceListener
from dagster_rebalance.kafka.group_ports import CommitAnswered, CommitResult
from dagster_rebalance.testing.fake_group import FakeGroup, FakeMember
from tests.kafka.fake_log import fake_log

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer
    from dagster_rebalance.kafka.consumer.state import PauseMarksPolicy

    NewConsumer = Callable[[PauseMarksPolicy], RebalanceAwareConsumer]

CONFIG = {"bootstrap.servers": "nobody:9092", "group.id": "etl", "auto.offset.reset": "earliest"}
P0, P1, P2, P3 = EVERYTHING = tuple(TopicPartition("orders", number) for number in range(4))


@pytest.fixture
def group() -> FakeGroup:
    """A group without members, with a topic of four partitions."""
    return FakeGroup({"orders": 4, "clicks": 1})


@pytest.fixture
def new(group: FakeGroup) -> NewConsumer:
    """Makes subscribed consumers."""

    def make(pause_marks: PauseMarksPolicy) -> RebalanceAwareConsumer:
        consumer = RebalanceAwareConsumer(
            CONFIG,
            fetch=False,
            member=group.member(),
            cluster=group,
            clock=group.clock,
            pause_marks=pause_marks,
        )
        consumer.subscribe(["orders"])
        return consumer

    return make


def hand_over(blue: RebalanceAwareConsumer, green: RebalanceAwareConsumer) -> None:
    """Two partitions go from the one to the other."""
    for consumer in (green, blue, blue, green):
        consumer.poll(0.1)
    assert green.assignment() == {P2, P3}


def eager(group: FakeGroup) -> RebalanceAwareConsumer:
    """A consumer that clears marks, with a strategy that takes everything in each rebalance."""
    strategy = {"group.protocol": "classic", "partition.assignment.strategy": "range"}
    consumer = RebalanceAwareConsumer(
        {**CONFIG, **strategy},
        fetch=False,
        member=group.member(),
        cluster=group,
        clock=group.clock,
        pause_marks="clear",
    )
    consumer.subscribe(["orders"])
    consumer.poll(0.1)
    consumer.pause([P0, P2])
    return consumer


def test_an_eager_rebalance_clears_the_marks_of_what_does_not_come_back(group: FakeGroup) -> None:
    """An eager rebalance also revokes, at once, the partitions that it gives back.

    The consumer must not return records of paused partitions then.
    """
    blue = eager(group)
    blue._rebalances._apply(RevokeRequested(EVERYTHING), same_poll=False)
    blue._state.revokes.start_poll()
    blue._state.unassign(EVERYTHING)
    assert blue.paused() == {P0, P2}
    blue._rebalances._apply(PartitionsAssigned((P0, P1)), same_poll=False)
    assert blue.paused() == {P0}
    blue._rebalances._apply(PartitionsAssigned((P2, P3)), same_poll=False)
    assert blue.paused() == {P0}


def test_a_loss_clears_marks_with_an_eager_strategy_too(group: FakeGroup) -> None:
    """What is assigned after it is a new ownership."""
    blue = eager(group)
    group.fence(group.members[0])
    blue.poll(0.1)
    assert blue.get_lost_partitions() == set(EVERYTHING)
    assert not blue.paused()


def test_marks_stay_when_partitions_go_and_count_when_they_come_back(new: NewConsumer) -> None:
    """The default: a pause is the user's wish, and nobody else takes it back."""
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


def test_marks_are_cleared_with_a_revoke_where_that_is_asked_for(new: NewConsumer) -> None:
    """The consumer clears the marks of revoked partitions and keeps those of retained ones.

    KAFKA-20385: "when partitions are revoked, any paused states on those partitions are cleared".
    """
    blue, green = new("clear"), new("clear")
    blue.poll(0.1)
    blue.pause([P0, P2])
    hand_over(blue, green)
    assert blue.paused() == {P0}


def test_marks_are_cleared_with_a_loss_too_where_that_is_asked_for(
    group: FakeGroup, new: NewConsumer
) -> None:
    """A lost partition is as gone as a revoked one."""
    blue = new("clear")
    blue.poll(0.1)
    blue.pause([P0])
    group.fence(group.members[0])
    blue.poll(0.1)
    assert blue.get_lost_partitions() == set(EVERYTHING)
    assert not blue.paused()


def test_marks_of_topics_patterns_and_everything_outlive_any_rebalance(
    new: NewConsumer,
) -> None:
    """They are the consumer's own, whatever the setting."""
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


def test_partitions_that_are_not_assigned_or_do_not_exist_can_be_paused(
    group: FakeGroup, new: NewConsumer
) -> None:
    """A pause does not depend on the assignment.

    The document on pausing: "No matter whether the consumer has assigned any topicPartitions or
    not".
    """
    blue = new("keep")
    later = TopicPartition("orders", 5)
    blue.pause([P1, later])
    assert blue.paused() == {P1, later}
    blue.poll(0.1)
    group.add_partitions("orders", 6)
    blue.poll(0.1)
    assert later in blue.assignment()
    assert blue.paused() == {P1, later}


def test_a_topic_that_is_not_subscribed_cannot_be_paused(new: NewConsumer) -> None:
    """Only a subscribed topic can be paused.

    The document on pausing: "Throws IllegalStateException if this consumer is not currently
    subscribed to any topic provided".
    """
    blue = new("keep")
    with pytest.raises(IllegalStateError, match="'clicks'"):
        blue.pause_topics(["orders", "clicks"])
    blue.poll(0.1)
    assert not blue.paused()
    blue.subscribe(re.compile("cli.*"))
    blue.pause_topics(["clicks"])


def test_a_held_revoke_and_a_pause_know_nothing_of_each_other(new: NewConsumer) -> None:
    """A resume must not wake a partition that is to be revoked.

    The revoke of a partition must not resume it when it is paused.
    """
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


def test_a_mark_travels_with_its_partition(group: FakeGroup, new: NewConsumer) -> None:
    """The next owner of a partition goes on with its pause mark.

    The document on pausing: when it "is assigned to a new consumer, the new consumer can continue
    to maintain the paused mark".
    """
    blue, green = new("carry"), new("carry")
    group.committed[P2] = OffsetAndMetadata(7, "the user's")
    blue.poll(0.1)
    blue.pause([P0, P2])
    hand_over(blue, green)
    assert green.paused() == {P2}
    assert green.committed([P2]) == {P2: OffsetAndMetadata(7, "the user's")}
    assert blue.paused() == {P0}


def test_a_mark_that_was_taken_away_does_not_come_back(group: FakeGroup, new: NewConsumer) -> None:
    """The last owner decides, also over the one before it."""
    blue, green = new("carry"), new("carry")
    blue.poll(0.1)
    blue.pause([P2])
    hand_over(blue, green)
    green.resume([P2])
    green.close()
    blue.poll(0.1)
    assert blue.assignment() == set(EVERYTHING)
    assert not blue.paused()
    assert group.committed[P2] == OffsetAndMetadata(0)


@pytest.mark.parametrize("resumes", [True, False])
def test_a_mark_that_a_commit_has_changed_is_changed_back(
    group: FakeGroup, new: NewConsumer, *, resumes: bool
) -> None:
    """The user's commits bring the marks of their moment, and the user has changed its mind since.

    The next owner would not read the partition, or read it in spite of its pause.
    """
    blue = new("carry")
    blue.poll(0)
    if not resumes:
        blue.pause([P0])
        blue.poll(0)
    change, change_back = (blue.pause, blue.resume) if resumes else (blue.resume, blue.pause)
    change([P0])
    blue.commit_sync({P0: OffsetAndMetadata(3)})
    change_back([P0])
    blue.poll(0)
    assert group.committed == {P0: OffsetAndMetadata(3, "" if resumes else with_mark(""))}


def test_a_mark_that_a_commit_on_its_way_changes_is_changed_back(
    group: FakeGroup, new: NewConsumer
) -> None:
    """Its answer may come behind that of a newer one, and says nothing about what is stored."""
    blue = new("carry")
    blue.poll(0)
    blue.pause([P0])
    blue.commit_async({P0: OffsetAndMetadata(3)})
    blue.resume([P0])
    blue.commit_sync({P0: OffsetAndMetadata(4)})
    blue.poll(0)
    blue.pause([P0])
    blue.poll(0)
    assert group.committed == {P0: OffsetAndMetadata(4, with_mark(""))}


def test_a_mark_that_is_stored_is_not_stored_again(group: FakeGroup, new: NewConsumer) -> None:
    """Each poll would ask Kafka, and commit."""
    blue = new("carry")
    blue.poll(0)
    blue.pause([P0])
    blue.commit_sync({P0: OffsetAndMetadata(3)})
    blue.poll(0)
    group.committed.clear()
    blue.poll(0)
    blue.commit_sync({P0: OffsetAndMetadata(4)})
    group.committed.clear()
    blue.poll(0)
    assert not group.committed


def test_a_mark_survives_a_crash_once_it_was_polled(group: FakeGroup, new: NewConsumer) -> None:
    """Nobody gets to say goodbye when a machine dies."""
    blue = new("carry")
    blue.poll(0.1)
    blue.pause([P0])
    blue.poll(0.1)
    group.fence(group.members[0])
    green = new("carry")
    green.poll(0.1)
    assert green.paused() == {P0}


def test_a_mark_and_claims_share_the_metadata_of_a_commit(
    group: FakeGroup, new: NewConsumer
) -> None:
    """Neither may erase the other."""
    blue, green = new("carry"), new("carry")
    blue.poll(0.1)
    blue.pause([P2])
    claimed = StoredPartition(3, (Claim(9, "batch-1"),))
    blue.commit_sync({P2: encode(claimed)})
    hand_over(blue, green)
    assert green.paused() == {P2}
    found = green.committed([P2])[P2]
    assert found is not None
    assert decode(found) == claimed
    assert group.committed[P2] != found


def test_a_consumer_that_carries_marks_gives_no_metadata_for_transactions(new: NewConsumer) -> None:
    """To store a mark, the consumer commits the last offset again.

    That would undo what a transaction has committed meanwhile.
    """
    assert new("keep").group_metadata().group_id == "etl"
    with pytest.raises(IllegalStateError, match="use pause_marks='keep' or 'clear'"):
        new("carry").group_metadata()


def test_a_consumer_that_does_not_carry_marks_reads_past_those_of_others(
    group: FakeGroup, new: NewConsumer
) -> None:
    """A mark must not be mistaken for somebody's text, and goes with the next commit."""
    blue, green = new("carry"), new("keep")
    blue.poll(0.1)
    blue.pause([P2])
    hand_over(blue, green)
    assert not green.paused()
    assert green.committed([P2]) == {P2: OffsetAndMetadata(0)}
    green.commit_sync({P2: OffsetAndMetadata(1)})
    assert group.committed[P2] == OffsetAndMetadata(1)


class Busy(FakeMember):
    """A member whose coordinator is moving."""

    busy = True

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Not now."""
        if self.busy:
            msg = "the coordinator is moving"
            raise BrokerError(msg, retriable=True)
        return super().committed(partitions, timeout_s)


def test_a_mark_that_the_broker_cannot_tell_yet_is_asked_for_again(
    group: FakeGroup, new: NewConsumer
) -> None:
    """A broker that is busy for a second must not turn into records that nobody wanted."""
    blue = new("carry")
    blue.poll(0.1)
    blue.pause([P0])
    blue.close()
    member = Busy(group)
    green = RebalanceAwareConsumer(
        CONFIG, fetch=False, member=member, cluster=group, clock=group.clock, pause_marks="carry"
    )
    green.subscribe(["orders"])
    green.poll(0.1)
    assert green.assignment() == set(EVERYTHING)
    assert not green.paused()
    member.busy = False
    group.clock.advance(5.0)
    green.poll(0.1)
    assert green.paused() == {P0}


class Away(FakeMember):
    """A member whose coordinator keeps each question waiting for as long as it may."""

    def __init__(self, group: FakeGroup) -> None:
        super().__init__(group)
        self.is_away = False

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Not answered in time."""
        if self.is_away:
            self._group.clock.advance(timeout_s)
            msg = "the coordinator is away"
            raise BrokerError(msg, retriable=True)
        return super().committed(partitions, timeout_s)


@pytest.fixture
def away(group: FakeGroup) -> tuple[Away, RebalanceAwareConsumer]:
    """A consumer that owns everything and has paused a partition, and its coordinator goes away."""
    member = Away(group)
    consumer = RebalanceAwareConsumer(
        CONFIG, fetch=False, member=member, cluster=group, clock=group.clock, pause_marks="carry"
    )
    consumer.subscribe(["orders"])
    consumer.poll(0)
    consumer.pause([P0])
    member.is_away = True
    return member, consumer


def test_a_coordinator_that_is_away_keeps_polls_waiting_for_a_sixth_of_the_time(
    group: FakeGroup, away: tuple[Away, RebalanceAwareConsumer]
) -> None:
    """A mark that waits must not cost the records of the other partitions their speed."""
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
    member.is_away = False
    group.clock.advance(5.0)
    consumer.poll(0)
    assert group.committed == {P0: OffsetAndMetadata(0, with_mark(""))}


def test_a_close_waits_for_no_mark_beyond_its_time(
    group: FakeGroup, away: tuple[Away, RebalanceAwareConsumer]
) -> None:
    """The rest of a shutdown waits for it."""
    _, consumer = away
    before = group.clock()
    consumer.close(1.0)
    assert group.clock() - before == pytest.approx(1.0)


@pytest.mark.parametrize("answers", [False, True])
def test_the_commit_of_a_mark_is_not_waited_for_without_an_end(
    group: FakeGroup, new: NewConsumer, *, answers: bool
) -> None:
    """A poll would last as long as the outage; the mark stays on its way."""
    blue = new("carry")
    blue.poll(0)
    blue.pause([P0])
    group.answers_commits = answers
    blue.poll(0)
    group.answers_commits = True
    blue.poll(0)
    assert group.committed == {P0: OffsetAndMetadata(0, with_mark(""))}


@pytest.mark.parametrize("resumes", [True, False])
def test_a_mark_that_is_stored_late_is_changed_back(
    group: FakeGroup, new: NewConsumer, *, resumes: bool
) -> None:
    """The user has changed its mind while the commit of the mark had no answer."""
    blue = new("carry")
    blue.poll(0)
    if not resumes:
        blue.pause([P0])
        blue.poll(0)
    change, change_back = (blue.pause, blue.resume) if resumes else (blue.resume, blue.pause)
    change([P0])
    group.answers_commits = False
    blue.poll(0)
    change_back([P0])
    group.answers_commits = True
    group.clock.advance(5.0)
    blue.poll(0)
    assert group.committed == {P0: OffsetAndMetadata(0, "" if resumes else with_mark(""))}


def test_the_mark_of_a_lost_partition_is_no_reason_to_raise(
    group: FakeGroup, new: NewConsumer
) -> None:
    """The poll that cannot store it tells the loss."""
    blue = new("carry")
    blue.poll(0)
    blue.pause([P0])
    group.members[0].deliver(PartitionsLost(EVERYTHING, LostReason.FENCED))
    blue.poll(0)
    assert blue.get_lost_partitions() == set(EVERYTHING)
    assert not group.committed


class PauseOnAssignment(RebalanceListener):
    """Pauses the first two partitions as soon as they are assigned."""

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Pause."""
        consumer.pause([P0, P1])

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("reset", ["latest", "error"])
def test_a_mark_without_a_place_for_it_keeps_no_record_back(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch, reset: str
) -> None:
    """Where reading begins cannot be looked up, and each poll would raise before it reads."""
    fake_log(group, monkeypatch, {2: 3})
    group.committed = dict.fromkeys((P1, P2, P3), OffsetAndMetadata(0))
    group.silence(P0)
    consumer = RebalanceAwareConsumer(
        {**CONFIG, "auto.offset.reset": reset},
        member=group.member(),
        cluster=group,
        clock=group.clock,
        pause_marks="carry",
    )
    consumer.subscribe(["orders"])
    consumer.set_rebalance_listener(PauseOnAssignment())
    read: list[int | None] = []
    for _ in range(3):
        with suppress(BrokerError):  # the fetcher tells what does not mend itself
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


class Slow(FakeMember):
    """A member whose group takes its time to tell what it has committed."""

    def __init__(self, group: FakeGroup) -> None:
        super().__init__(group)
        self.limits: list[float] = []
        self.takes_s = 0.0

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Answered late."""
        self.limits.append(timeout_s)
        self._group.clock.advance(self.takes_s)
        return super().committed(partitions, timeout_s)


@pytest.mark.parametrize("takes_s", [0.4, 0.7])
def test_no_place_for_a_mark_is_looked_up_without_time_for_the_answer(
    group: FakeGroup, takes_s: float
) -> None:
    """The client takes a time-out below 0 as endless, and one that is too short costs it dearly."""
    member = Slow(group)
    consumer = RebalanceAwareConsumer(
        CONFIG, fetch=False, member=member, cluster=group, clock=group.clock, pause_marks="carry"
    )
    consumer.subscribe(["orders"])
    consumer.poll(0)
    consumer.pause([P0, P1])
    member.takes_s = takes_s
    consumer.poll(0)
    assert min(member.limits) >= 0.5


class Failing(FakeMember):
    """A member whose commits fail for now."""

    def commit_async(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> int:
        """Answered without being stored."""
        ticket = super().commit_async(offsets)
        self._pending.clear()
        error = BrokerError("the coordinator is moving", retriable=True)
        self.deliver(
            CommitAnswered(ticket, CommitResult(frozenset(), dict.fromkeys(offsets, error)))
        )
        return ticket


def test_a_mark_that_was_never_stored_is_not_taken_away_with_a_commit(group: FakeGroup) -> None:
    """The user has committed nothing, and the position may be behind records that are at work."""
    member = Failing(group)
    consumer = RebalanceAwareConsumer(
        CONFIG, fetch=False, member=member, cluster=group, clock=group.clock, pause_marks="carry"
    )
    consumer.subscribe(["orders"])
    consumer.poll(0)
    consumer.pause([P0])
    consumer.poll(0)
    member.commit_async = super(Failing, member).commit_async  # type: ignore[method-assign]
    consumer.resume([P0])
    group.clock.advance(5.0)
    consumer.poll(0)
    assert not group.committed


def test_an_unknown_policy_is_refused() -> None:
    """At the start, with the values that there are."""
    with pytest.raises(ConfigurationError, match="'keep', 'clear' or 'carry'"):
        RebalanceAwareConsumer(CONFIG, fetch=False, pause_marks="forget")  # type: ignore[arg-type]
