"""The simulated client, where the member loop does not use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.events import PartitionsAssigned, RevokeRequested
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.group_ports import CommitAnswered
from proofs.simulation.coordinator import TOPIC, Grant
from proofs.simulation.world import World

if TYPE_CHECKING:
    from dagster_rebalance.core.model.errors import BrokerError


def test_async_commit_is_stored_and_answered_by_a_later_poll() -> None:
    world, partition = World(2), TopicPartition(TOPIC, 0)
    world.clockwork.run(5)
    (process,) = world.processes
    stored = world.group.stored[partition]
    answers: list[tuple[dict[TopicPartition, OffsetAndMetadata], BrokerError | None]] = []
    process.consumer.commit_async(
        {partition: stored}, lambda offsets, error: answers.append((dict(offsets), error))
    )
    process.consumer.poll(0)
    assert answers == [({partition: stored}, None)]
    assert process.consumer.offsets_for_times({partition: 0}) == {partition: None}


def test_poll_returns_all_events_since_the_previous_poll() -> None:
    world = World(2)
    world.clockwork.run(5)
    member = world.processes[0].member
    mine = member._owned
    first, other = min(mine), TopicPartition(TOPIC, 99)
    epoch = member._epoch
    for number, partitions in enumerate((mine | {other}, mine - {first} | {other}), epoch + 1):
        member._inbox.append((member.member_id, Grant(number, frozenset(partitions))))
    told = [event for event in member.poll(0) if not isinstance(event, CommitAnswered)]
    assert told == [PartitionsAssigned((other,)), RevokeRequested((first,))]
