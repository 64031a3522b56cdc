"""A release that comes too late: the real client refuses it, or it would give away what was granted since."""

from __future__ import annotations

import confluent_kafka

from dagster_rebalance.consumer.events import HoldSuperseded, LostReason, PartitionsLost
from dagster_rebalance.consumer.membership import Member
from dagster_rebalance.consumer.settings import validated
from dagster_rebalance.core.partition import TopicPartition

P0 = TopicPartition("orders", 0)
GRANTED = confluent_kafka.TopicPartition("orders", 0)


def holding() -> Member:
    """A member whose broker nobody can reach, and which holds a partition."""
    member = Member(validated({"bootstrap.servers": "127.0.0.1:1", "group.id": "etl"}, hold_limit_s=10))
    session = member._session
    session._on_assign(session.consumer, [GRANTED])
    session._on_revoke(session.consumer, [GRANTED])
    return member


def is_told_lost_once(member: Member) -> bool:
    """What was held is lost, superseded, and nothing more is said or owned."""
    told = member.poll(0)
    later = member.poll(0)
    return told[-2:] == [HoldSuperseded((P0,)), PartitionsLost((P0,), LostReason.SUPERSEDED)] and not later and not member.assignment()


def test_a_refused_release_is_told_as_a_loss_and_not_raised() -> None:
    """Another rebalance was faster. Raised, it would end the member; ignored, the member would believe that it still owns the partition."""
    member = holding()
    member._session.consumer.incremental_unassign([GRANTED])
    member.release()
    assert is_told_lost_once(member)
    member.close(5.0)


def test_a_release_of_what_was_granted_again_is_not_sent() -> None:
    """The client would take it for the unassign of the new grant."""
    member = holding()
    client = member._session.consumer
    member._session._on_assign(client, [GRANTED])
    member.release()
    assert client.assignment() == [GRANTED]
    assert is_told_lost_once(member)
    member.close(5.0)
