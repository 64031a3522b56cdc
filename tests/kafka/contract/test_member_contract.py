"""Contract of the group member: fake group, mock cluster and broker behave alike."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.errors import IllegalStateError, PartitionLostError
from dagster_rebalance.core.model.events import (
    LostReason,
    PartitionsAssigned,
    PartitionsLost,
    RevokeRequested,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.group_ports import CommitAnswered, CommitResult
from tests.kafka.contract.stages import Actor, Stage, pass_time, play, share

if TYPE_CHECKING:
    from collections.abc import Callable

    NewActor = Callable[[], Actor]


def test_single_member_is_assigned_all_partitions(blue: Actor) -> None:
    assert sorted(blue.partitions_of(PartitionsAssigned)) == sorted(blue.everything)
    assert blue.member.member_id


def test_held_partitions_stay_assigned_while_polling(blue: Actor, green: Actor) -> None:
    pass_time(blue, green, polls=15)
    assert blue.owns == blue.everything
    assert not green.owns
    assert len(blue.member.held) == 2
    assert frozenset(blue.partitions_of(RevokeRequested)) == blue.member.held


def test_commits_succeed_during_a_hold(blue: Actor, green: Actor) -> None:
    pass_time(blue, green, polls=3)
    result = blue.member.commit({tp: OffsetAndMetadata(7, "drained") for tp in blue.everything})
    assert result.committed == blue.everything
    assert not result.failed


def test_release_hands_the_held_partitions_over(blue: Actor, green: Actor) -> None:
    held = blue.member.held
    blue.member.commit(dict.fromkeys(held, OffsetAndMetadata(7, "drained")))
    blue.member.release()
    assert blue.owns == blue.everything - held
    play(lambda: green.owns == held, blue, green, what="green to own the held partitions")
    found = green.member.committed(held, 60.0)
    assert {
        tp: (offset.offset, offset.metadata) for tp, offset in found.items() if offset
    } == dict.fromkeys(held, (7, "drained"))
    assert not blue.partitions_of(PartitionsLost)


def test_released_partitions_return_when_the_other_member_leaves(blue: Actor, green: Actor) -> None:
    held = blue.member.held
    blue.member.release()
    play(lambda: green.owns == held, blue, green, what="green to own the held partitions")
    green.member.close(60.0)
    play(
        lambda: blue.owns == blue.everything,
        blue,
        what="blue to own everything again",
    )
    assert sorted(blue.partitions_of(PartitionsAssigned)) == sorted([*blue.everything, *held])


def test_metadata_of_a_commit_is_read_back(blue: Actor) -> None:
    first, second = sorted(blue.everything)[:2]
    text = '{"v":1,"b":"2f1d","n":[[0,120]]} ☂'
    blue.member.commit({first: OffsetAndMetadata(3, text)})
    found = blue.member.committed([first, second], 60.0)
    assert found[second] is None
    stored = found[first]
    assert stored is not None
    assert (stored.offset, stored.metadata) == (3, text)


def test_commit_of_a_partition_that_is_not_assigned_is_refused(stage: Stage, blue: Actor) -> None:
    """The broker checks only the member; the other offsets are committed."""
    mine, foreign = min(blue.everything), TopicPartition(stage.topic, 99)
    result = blue.member.commit({mine: OffsetAndMetadata(1), foreign: OffsetAndMetadata(1)})
    assert result.committed == {mine}
    assert isinstance(result.failed[foreign], PartitionLostError)


def answers(blue: Actor) -> dict[int, CommitResult]:
    """The results of asynchronous commits, by ticket."""
    return {
        event.ticket: event.result for event in blue.events if isinstance(event, CommitAnswered)
    }


def test_asynchronous_commits_are_answered_in_order(stage: Stage, blue: Actor) -> None:
    first, second = sorted(blue.everything)[:2]
    foreign = TopicPartition(stage.topic, 99)
    tickets = [
        blue.member.commit_async({first: OffsetAndMetadata(1), second: OffsetAndMetadata(7)}),
        *(blue.member.commit_async({first: OffsetAndMetadata(offset)}) for offset in range(2, 9)),
        blue.member.commit_async({foreign: OffsetAndMetadata(1)}),
    ]
    play(lambda: len(answers(blue)) == len(tickets), blue, what="all answers")
    assert list(answers(blue)) == tickets
    assert answers(blue)[tickets[0]].committed == {first, second}
    assert isinstance(answers(blue)[tickets[-1]].failed[foreign], PartitionLostError)
    assert not any(answers(blue)[ticket].failed for ticket in tickets[:-1])
    stored = blue.member.committed([first, second], 60.0)
    assert [stored[tp].offset for tp in (first, second)] == [8, 7]  # type: ignore[union-attr]


def test_synchronous_commit_is_stored_after_earlier_asynchronous_ones(blue: Actor) -> None:
    mine = min(blue.everything)
    tickets = [blue.member.commit_async({mine: OffsetAndMetadata(offset)}) for offset in (3, 4)]
    assert blue.member.commit({mine: OffsetAndMetadata(5)}).committed == {mine}
    assert blue.member.settle(0)
    blue.poll()
    assert list(answers(blue)) == tickets
    stored = blue.member.committed([mine], 60.0)[mine]
    assert stored is not None
    assert stored.offset == 5


def test_settle_waits_for_commits_in_flight(blue: Actor) -> None:
    ticket = blue.member.commit_async(dict.fromkeys(blue.everything, OffsetAndMetadata(2)))
    assert blue.member.settle(60.0)
    assert {
        offset.offset for offset in blue.member.committed(blue.everything, 60.0).values() if offset
    } == {2}
    blue.poll()
    assert answers(blue)[ticket].committed == blue.everything


@pytest.mark.parametrize("ending", ["release", "unsubscribe", "close"])
def test_release_and_leave_wait_for_commits_in_flight(
    blue: Actor, green: Actor, ending: str
) -> None:
    """A later commit would overwrite the next owner's."""
    held = blue.member.held
    tickets = [
        blue.member.commit_async(dict.fromkeys(held, OffsetAndMetadata(offset)))
        for offset in (6, 7)
    ]
    if ending == "close":
        blue.member.close(60.0)
    elif ending == "release":
        blue.member.release()
    else:
        blue.member.unsubscribe(60.0)
    polled = [green] if ending == "close" else [blue, green]
    play(lambda: held <= green.owns, *polled, what="green to own the held partitions")
    assert [offset and offset.offset for offset in green.member.committed(held, 60.0).values()] == [
        7,
        7,
    ]
    if ending != "close":
        assert list(answers(blue)) == tickets
        assert {tp for result in answers(blue).values() for tp in result.committed} == held


@pytest.mark.usefixtures("green")
def test_asynchronous_commit_detects_fencing_during_a_hold(stage: Stage, blue: Actor) -> None:
    stage.evict(blue.member)
    ticket = blue.member.commit_async(dict.fromkeys(blue.everything, OffsetAndMetadata(1)))
    play(lambda: blue.partitions_of(PartitionsLost), blue, what="the loss to be noticed")
    assert {type(error) for error in answers(blue)[ticket].failed.values()} == {PartitionLostError}
    assert not answers(blue)[ticket].committed
    assert sorted(blue.partitions_of(PartitionsLost)) == sorted(blue.everything)


def test_probe_detects_fencing_during_a_hold(stage: Stage, blue: Actor, green: Actor) -> None:
    """The client calls no callback. Each partition is reported once."""
    blue.member.commit({tp: OffsetAndMetadata(1) for tp in blue.everything})
    stage.evict(blue.member)
    play(lambda: blue.partitions_of(PartitionsLost), blue, green, what="the loss to be noticed")
    assert sorted(blue.partitions_of(PartitionsLost)) == sorted(blue.everything)
    assert [event.reason for event in blue.events if isinstance(event, PartitionsLost)] == [
        LostReason.FENCED
    ]
    assert not blue.member.held


def test_probe_detects_fencing_without_a_committed_offset(
    stage: Stage, blue: Actor, green: Actor
) -> None:
    """The probe must not leave an offset behind."""
    pass_time(blue, green, polls=15)
    assert set(blue.member.committed(blue.everything, 60.0).values()) == {None}
    assert not blue.partitions_of(PartitionsLost)
    stage.evict(blue.member)
    play(lambda: blue.partitions_of(PartitionsLost), blue, green, what="the loss to be noticed")
    assert sorted(blue.partitions_of(PartitionsLost)) == sorted(blue.everything)
    assert set(green.member.committed(blue.everything, 60.0).values()) == {None}


@pytest.mark.usefixtures("green")
def test_commit_after_fencing_fails_with_partition_lost(stage: Stage, blue: Actor) -> None:
    stage.evict(blue.member)
    result = blue.member.commit({tp: OffsetAndMetadata(1) for tp in blue.everything})
    assert not result.committed
    assert all(isinstance(error, PartitionLostError) for error in result.failed.values())


def test_fenced_member_rejoins(stage: Stage, blue: Actor, green: Actor) -> None:
    stage.evict(blue.member)
    play(lambda: blue.partitions_of(PartitionsLost), blue, green, what="the loss to be noticed")
    share(blue, green)
    assert sorted(blue.partitions_of(PartitionsLost)) == sorted(blue.everything)


def test_fencing_without_a_hold_is_reported_once(stage: Stage, blue: Actor) -> None:
    stage.evict(blue.member)
    play(lambda: blue.partitions_of(PartitionsLost), blue, what="the loss")
    assert sorted(blue.partitions_of(PartitionsLost)) == sorted(blue.everything)
    assert [event.reason for event in blue.events if isinstance(event, PartitionsLost)] == [
        LostReason.SESSION
    ]


def test_close_during_a_hold_revokes_all_partitions(blue: Actor, green: Actor) -> None:
    blue.member.close(60.0)
    play(lambda: green.owns == blue.everything, green, what="green to own everything")


def test_close_before_the_first_assignment_is_quick(actor: NewActor) -> None:
    blue = actor().subscribe()
    blue.poll()
    blue.member.close(60.0)
    assert not blue.owns
    with pytest.raises(IllegalStateError, match="closed"):
        blue.member.poll(0)


def test_unsubscribe_during_a_hold_leaves_the_group(blue: Actor, green: Actor) -> None:
    blue.member.unsubscribe(60.0)
    play(
        lambda: green.owns == blue.everything,
        blue,
        green,
        what="green to own everything",
    )
    assert not blue.owns
    green.member.close(60.0)
    blue.subscribe()
    play(
        lambda: blue.owns == blue.everything,
        blue,
        what="blue to own everything again",
    )


def test_release_without_a_hold_is_refused(blue: Actor) -> None:
    with pytest.raises(IllegalStateError, match="held"):
        blue.member.release()
    assert blue.owns == blue.everything


def test_pattern_subscribes_to_topics_whose_whole_name_matches(
    stage: Stage, actor: NewActor
) -> None:
    """Python's rules apply to all brokers and protocols."""
    blue = actor()
    blue.member.subscribe(re.compile(re.escape(stage.topic[:-1]) + "."))
    play(lambda: blue.owns == blue.everything, blue, what="the topic to be found")


def test_new_pattern_without_a_match_revokes_the_old_topics(blue: Actor) -> None:
    blue.member.subscribe(re.compile("no-topic-has-this-name"))
    play(lambda: blue.member.held == blue.everything, blue, what="the revoke")
    partition = min(blue.owns)
    stored = blue.member.commit({partition: OffsetAndMetadata(3)})
    assert stored.committed == {partition}
    blue.member.release()
    pass_time(blue)
    assert blue.owns == frozenset()
    assert blue.partitions_of(PartitionsLost) == []
    blue.subscribe()
    play(lambda: blue.owns == blue.everything, blue, what="the topic to be read again")
