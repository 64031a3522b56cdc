"""What every member of a group does, whoever plays it."""

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
from tests.kafka.contract.stages import Actor, Stage, pass_time, play

if TYPE_CHECKING:
    from collections.abc import Callable

    NewActor = Callable[[], Actor]


def everything(stage: Stage) -> frozenset[TopicPartition]:
    """All partitions of the topic."""
    return frozenset(TopicPartition(stage.topic, number) for number in range(4))


def alone(stage: Stage, actor: NewActor) -> Actor:
    """A member that owns all partitions."""
    blue = actor().subscribe()
    play(lambda: blue.owns == everything(stage), blue, what="the first member to own everything")
    return blue


def holding(stage: Stage, actor: NewActor) -> tuple[Actor, Actor]:
    """A member that holds two partitions, and the one that waits for them."""
    blue = alone(stage, actor)
    green = actor().subscribe()
    play(lambda: blue.member.held, blue, green, what="a revoke request to the first member")
    return blue, green


def test_a_single_member_is_assigned_everything(stage: Stage, actor: NewActor) -> None:
    """The start of every life of a group, told as an event."""
    blue = alone(stage, actor)
    assert sorted(blue.all_told(PartitionsAssigned)) == sorted(everything(stage))
    assert blue.member.member_id


def test_held_partitions_stay_assigned_while_polling_goes_on(stage: Stage, actor: NewActor) -> None:
    """The whole point: a hold neither blocks the member nor gives anything away."""
    blue, green = holding(stage, actor)
    pass_time(blue, green, polls=15)
    assert blue.owns == everything(stage)
    assert not green.owns
    assert len(blue.member.held) == 2
    assert frozenset(blue.all_told(RevokeRequested)) == blue.member.held


def test_commits_succeed_during_a_hold(stage: Stage, actor: NewActor) -> None:
    """A drain commits what finishes, for held and for retained partitions."""
    blue, green = holding(stage, actor)
    pass_time(blue, green, polls=3)
    result = blue.member.commit({tp: OffsetAndMetadata(7, "drained") for tp in everything(stage)})
    assert result.committed == everything(stage)
    assert not result.failed


def test_a_release_hands_the_held_partitions_over(stage: Stage, actor: NewActor) -> None:
    """The next owner gets exactly what was held, and sees what was committed for it."""
    blue, green = holding(stage, actor)
    held = blue.member.held
    blue.member.commit(dict.fromkeys(held, OffsetAndMetadata(7, "drained")))
    blue.member.release()
    assert blue.owns == everything(stage) - held
    play(lambda: green.owns == held, blue, green, what="the second member to own what was held")
    found = green.member.committed(held, 5.0)
    assert {
        tp: (offset.offset, offset.metadata) for tp, offset in found.items() if offset
    } == dict.fromkeys(held, (7, "drained"))
    assert not blue.all_told(PartitionsLost)


def test_released_partitions_come_back_when_the_other_member_leaves(
    stage: Stage, actor: NewActor
) -> None:
    """A partition may be given up and granted again to the same member, as a new ownership."""
    blue, green = holding(stage, actor)
    held = blue.member.held
    blue.member.release()
    play(lambda: green.owns == held, blue, green, what="the second member to own what was held")
    green.member.close(5.0)
    play(
        lambda: blue.owns == everything(stage),
        blue,
        what="the first member to own everything again",
    )
    assert sorted(blue.all_told(PartitionsAssigned)) == sorted([*everything(stage), *held])


def test_metadata_of_a_commit_is_read_back(stage: Stage, actor: NewActor) -> None:
    """Claims are kept in it."""
    blue = alone(stage, actor)
    first, second = sorted(everything(stage))[:2]
    text = '{"v":1,"b":"2f1d","n":[[0,120]]} ☂'
    blue.member.commit({first: OffsetAndMetadata(3, text)})
    found = blue.member.committed([first, second], 5.0)
    assert found[second] is None
    stored = found[first]
    assert stored is not None
    assert (stored.offset, stored.metadata) == (3, text)


def test_a_commit_for_a_partition_that_is_not_assigned_is_refused(
    stage: Stage, actor: NewActor
) -> None:
    """The broker checks the member only, so the member itself must check the partition.

    The offsets of the other partitions are committed.
    """
    blue = alone(stage, actor)
    mine, foreign = min(everything(stage)), TopicPartition(stage.topic, 99)
    result = blue.member.commit({mine: OffsetAndMetadata(1), foreign: OffsetAndMetadata(1)})
    assert result.committed == {mine}
    assert isinstance(result.failed[foreign], PartitionLostError)


def answers(blue: Actor) -> dict[int, CommitResult]:
    """What became of the commits that were not waited for, by their tickets."""
    return {event.ticket: event.result for event in blue.told if isinstance(event, CommitAnswered)}


def test_commits_that_are_not_waited_for_are_answered_in_order(
    stage: Stage, actor: NewActor
) -> None:
    """Of several commits of one partition, the last offset stays.

    Each caller hears the outcome of its own commit.
    """
    blue = alone(stage, actor)
    first, second = sorted(everything(stage))[:2]
    foreign = TopicPartition(stage.topic, 99)
    asked = [
        blue.member.commit_async({first: OffsetAndMetadata(1), second: OffsetAndMetadata(7)}),
        *(blue.member.commit_async({first: OffsetAndMetadata(offset)}) for offset in range(2, 9)),
        blue.member.commit_async({foreign: OffsetAndMetadata(1)}),
    ]
    play(lambda: len(answers(blue)) == len(asked), blue, what="all answers")
    assert list(answers(blue)) == asked
    assert answers(blue)[asked[0]].committed == {first, second}
    assert isinstance(answers(blue)[asked[-1]].failed[foreign], PartitionLostError)
    assert not any(answers(blue)[ticket].failed for ticket in asked[:-1])
    stored = blue.member.committed([first, second], 5.0)
    assert [stored[tp].offset for tp in (first, second)] == [8, 7]  # type: ignore[union-attr]


def test_a_commit_that_is_waited_for_comes_after_those_that_are_not(
    stage: Stage, actor: NewActor
) -> None:
    """In another order, an older offset could be stored over a newer one.

    The next poll tells the answers to the older commits.
    """
    blue = alone(stage, actor)
    mine = min(everything(stage))
    asked = [blue.member.commit_async({mine: OffsetAndMetadata(offset)}) for offset in (3, 4)]
    assert blue.member.commit({mine: OffsetAndMetadata(5)}).committed == {mine}
    assert blue.member.settle(0)
    blue.poll()
    assert list(answers(blue)) == asked
    stored = blue.member.committed([mine], 5.0)[mine]
    assert stored is not None
    assert stored.offset == 5


def test_nothing_is_on_its_way_when_settling_says_so(stage: Stage, actor: NewActor) -> None:
    """Whoever closes something of its own waits with it; what happened meanwhile is not lost."""
    blue = alone(stage, actor)
    ticket = blue.member.commit_async(dict.fromkeys(everything(stage), OffsetAndMetadata(2)))
    assert blue.member.settle(5.0)
    assert {
        offset.offset for offset in blue.member.committed(everything(stage), 5.0).values() if offset
    } == {2}
    blue.poll()
    assert answers(blue)[ticket].committed == everything(stage)


@pytest.mark.parametrize("ending", ["release", "unsubscribe", "close"])
def test_giving_partitions_up_waits_for_commits_on_their_way(
    stage: Stage, actor: NewActor, ending: str
) -> None:
    """A commit that reached the broker later would overwrite the next owner's commit."""
    blue, green = holding(stage, actor)
    held = blue.member.held
    tickets = [
        blue.member.commit_async(dict.fromkeys(held, OffsetAndMetadata(offset)))
        for offset in (6, 7)
    ]
    if ending == "close":
        blue.member.close(5.0)
    elif ending == "release":
        blue.member.release()
    else:
        blue.member.unsubscribe(5.0)
    polled = [green] if ending == "close" else [blue, green]
    play(lambda: held <= green.owns, *polled, what="the second member to own what was held")
    assert [offset and offset.offset for offset in green.member.committed(held, 5.0).values()] == [
        7,
        7,
    ]
    if ending != "close":
        assert list(answers(blue)) == tickets
        assert {tp for result in answers(blue).values() for tp in result.committed} == held


def test_a_commit_on_its_way_learns_of_fencing_in_a_hold(stage: Stage, actor: NewActor) -> None:
    """It is told as lost, and so is everything that the member had, once."""
    blue, _ = holding(stage, actor)
    stage.evict(blue.member)
    ticket = blue.member.commit_async(dict.fromkeys(everything(stage), OffsetAndMetadata(1)))
    play(lambda: blue.all_told(PartitionsLost), blue, what="the loss to be noticed")
    assert {type(error) for error in answers(blue)[ticket].failed.values()} == {PartitionLostError}
    assert not answers(blue)[ticket].committed
    assert sorted(blue.all_told(PartitionsLost)) == sorted(everything(stage))


def test_fencing_during_a_hold_is_reported_once_for_each_partition(
    stage: Stage, actor: NewActor
) -> None:
    """No callback tells of it: retained and held partitions are found lost by a probe."""
    blue, green = holding(stage, actor)
    blue.member.commit({tp: OffsetAndMetadata(1) for tp in everything(stage)})
    stage.evict(blue.member)
    play(lambda: blue.all_told(PartitionsLost), blue, green, what="the loss to be noticed")
    assert sorted(blue.all_told(PartitionsLost)) == sorted(everything(stage))
    assert [event.reason for event in blue.told if isinstance(event, PartitionsLost)] == [
        LostReason.FENCED
    ]
    assert not blue.member.held


def test_fencing_during_a_hold_is_found_where_nothing_is_committed(
    stage: Stage, actor: NewActor
) -> None:
    """The probe has no offset to commit back unchanged, and it must not leave one behind."""
    blue, green = holding(stage, actor)
    pass_time(blue, green, polls=15)
    assert set(blue.member.committed(everything(stage), 5.0).values()) == {None}
    assert not blue.all_told(PartitionsLost)
    stage.evict(blue.member)
    play(lambda: blue.all_told(PartitionsLost), blue, green, what="the loss to be noticed")
    assert sorted(blue.all_told(PartitionsLost)) == sorted(everything(stage))
    assert set(green.member.committed(everything(stage), 5.0).values()) == {None}


def test_a_commit_after_fencing_says_that_the_partitions_are_lost(
    stage: Stage, actor: NewActor
) -> None:
    """Whoever commits before the next probe must not take it for a passing trouble."""
    blue, _ = holding(stage, actor)
    stage.evict(blue.member)
    result = blue.member.commit({tp: OffsetAndMetadata(1) for tp in everything(stage)})
    assert not result.committed
    assert all(isinstance(error, PartitionLostError) for error in result.failed.values())


def test_a_fenced_member_takes_part_again(stage: Stage, actor: NewActor) -> None:
    """The group recovers by itself, and every partition has one owner."""
    blue, green = holding(stage, actor)
    stage.evict(blue.member)
    play(lambda: blue.all_told(PartitionsLost), blue, green, what="the loss to be noticed")

    def shared() -> bool:
        for each in (blue, green):
            if each.member.held:
                each.member.release()
        return len(blue.owns) == len(green.owns) == 2 and not blue.owns & green.owns

    play(shared, blue, green, what="both members to share the partitions again")
    assert sorted(blue.all_told(PartitionsLost)) == sorted(everything(stage))


def test_fencing_without_a_hold_is_reported_once_for_each_partition(
    stage: Stage, actor: NewActor
) -> None:
    """The client tells of this one by itself."""
    blue = alone(stage, actor)
    stage.evict(blue.member)
    play(lambda: blue.all_told(PartitionsLost), blue, what="the loss to be told")
    assert sorted(blue.all_told(PartitionsLost)) == sorted(everything(stage))
    assert [event.reason for event in blue.told if isinstance(event, PartitionsLost)] == [
        LostReason.SESSION
    ]


def test_closing_during_a_hold_hands_everything_over(stage: Stage, actor: NewActor) -> None:
    """Shutdown is the most frequent rebalance, and must not wait for a release."""
    blue, green = holding(stage, actor)
    blue.member.close(5.0)
    play(lambda: green.owns == everything(stage), green, what="the second member to own everything")


def test_closing_before_the_first_assignment_is_quick(actor: NewActor) -> None:
    """A deploy may end a process that has only just begun."""
    blue = actor().subscribe()
    blue.poll()
    blue.member.close(5.0)
    assert not blue.owns
    with pytest.raises(IllegalStateError, match="closed"):
        blue.member.poll(0)


def test_unsubscribing_during_a_hold_leaves_the_group(stage: Stage, actor: NewActor) -> None:
    """What is held goes with it, and the member may come back."""
    blue, green = holding(stage, actor)
    blue.member.unsubscribe(5.0)
    play(
        lambda: green.owns == everything(stage),
        blue,
        green,
        what="the second member to own everything",
    )
    assert not blue.owns
    green.member.close(5.0)
    blue.subscribe()
    play(
        lambda: blue.owns == everything(stage),
        blue,
        what="the first member to own everything again",
    )


def test_a_release_without_a_hold_is_refused(stage: Stage, actor: NewActor) -> None:
    """It would be a bug in the caller, and must not give partitions away."""
    blue = alone(stage, actor)
    with pytest.raises(IllegalStateError, match="held"):
        blue.member.release()
    assert blue.owns == everything(stage)


def test_a_pattern_subscribes_to_topics_whose_whole_name_matches(
    stage: Stage, actor: NewActor
) -> None:
    """Matched here with Python's rules, so that one dialect holds for all brokers and protocols."""
    blue = actor()
    blue.member.subscribe(re.compile(re.escape(stage.topic[:-1]) + "."))
    play(lambda: blue.owns == everything(stage), blue, what="the topic to be found")


def test_a_new_pattern_that_matches_nothing_gives_the_topics_before_up(
    stage: Stage, actor: NewActor
) -> None:
    """By a revoke like any other, and the member comes back for topics that exist."""
    blue = alone(stage, actor)
    blue.member.subscribe(re.compile("no-topic-has-this-name"))
    play(lambda: blue.member.held == everything(stage), blue, what="the revoke")
    partition = min(blue.owns)
    stored = blue.member.commit({partition: OffsetAndMetadata(3)})
    assert stored.committed == {partition}
    blue.member.release()
    pass_time(blue)
    assert blue.owns == frozenset()
    assert blue.all_told(PartitionsLost) == []
    blue.subscribe()
    play(lambda: blue.owns == everything(stage), blue, what="the topic to be read again")
