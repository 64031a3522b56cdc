"""A person executes a failed run again, and one of its ranges has disappeared.

The other ranges must not stay stopped for ever.
"""

from __future__ import annotations

from dataclasses import replace

from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.retry import RetryBackoff
from proofs.simulation.coordinator import TOPIC
from proofs.simulation.world import World

MOVED, LEFT = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
SEED = 450
"""One member, two partitions, batches of both, and no faults but those of the test."""


def test_rest_of_a_batch_is_requested_again_when_its_re_executed_run_refuses_to_start() -> None:
    world = World(SEED)
    assert world.weather.settings.limits.max_ranges_per_run > 1
    world.group.ends.update({MOVED: 5, LEFT: 5})
    world.is_calm = True  # nothing more is produced
    world.weather.runs_fail, world.weather.runs_retry = 1.0, 0.0
    (process,) = world.processes
    # Later attempts have one run per range and are requested anyway.
    once = replace(
        world.weather.settings, max_attempts=1, backoff=RetryBackoff(retry_stopped=False)
    )
    world.weather.settings = process.engine.settings = once
    while [owned.phase for owned in process.engine.partitions.values()] != [
        Phase.STOPPED,
        Phase.STOPPED,
    ]:
        world.clockwork.run(1)
    last = list(world.dagster.runs.values())[-1]
    assert len(last.ranges) == 2

    world.group.starts[MOVED] = 5
    world.people.move_behind_what_is_deleted(MOVED)
    world.weather.runs_fail = 0.0
    while not world.is_settled():
        world.clockwork.run(1)

    again, rest = list(world.dagster.runs.values())[-2:]
    assert again.is_retry
    assert again.is_refused
    assert again.ranges == last.ranges
    assert [(range_.topic_partition, range_.start, range_.until) for range_ in rest.ranges] == [
        (LEFT, 0, 5)
    ]
    assert "The rest of the batch, orders-1 [0, 5), is requested again by its owner" in "".join(
        world.clockwork.trace
    )
