"""The simulated client, where the pump does not use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition
from proofs.simulation.coordinator import TOPIC
from proofs.simulation.world import World

if TYPE_CHECKING:
    from dagster_rebalance.core.errors import BrokerError


def test_a_commit_that_is_not_waited_for_is_stored_and_answered_by_a_later_poll() -> None:
    """It plays the whole port, so that a pump that commits so could be simulated, too."""
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
