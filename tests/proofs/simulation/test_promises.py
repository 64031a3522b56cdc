"""The checks of commits, runs and leftovers detect violations that a test constructs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.claims import Claim, StoredPartition, decode, encode
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.partitions.state_machine import Change
from proofs.simulation.clockwork import Violation
from proofs.simulation.coordinator import TOPIC
from proofs.simulation.dagster_runs import SimulatedDagster
from proofs.simulation.schedule import play
from proofs.simulation.world import World

if TYPE_CHECKING:
    from proofs.simulation.process import Process

PARTITION = TopicPartition(TOPIC, 0)
QUIET = 2
"""A seed whose schedule has no faults."""


@pytest.fixture
def world() -> World:
    """A group that has worked for a while, without faults."""
    world = World(QUIET)
    assert world.weather.roughness == 0
    world.clockwork.run(20)
    assert world.group.stored[PARTITION].offset > 0
    return world


def owner(world: World) -> Process:
    """Whose partition it is."""
    return next(
        process
        for process in world.processes
        if process.member.member_id == world.group.owner(PARTITION)
    )


def commit(world: World, member_id: str, stored: OffsetAndMetadata) -> None:
    """Commit for a known member."""
    world.group.commit(member_id, world.group.seats[member_id].epoch, {PARTITION: stored})


def test_commit_for_a_partition_of_another_member_is_a_violation(world: World) -> None:
    before, member_id = world.group.stored[PARTITION], world.group.owner(PARTITION)
    assert member_id is not None
    world.group.seats[member_id].owned.discard(PARTITION)
    with pytest.raises(Violation, match="which belongs to None"):
        commit(world, member_id, before)


def test_commit_request_for_a_partition_that_is_not_owned_is_a_violation(world: World) -> None:
    with pytest.raises(Violation, match="it has learned not to own"):
        owner(world).member.commit({TopicPartition(TOPIC, 99): OffsetAndMetadata(1)})


def test_commit_of_an_earlier_offset_is_a_violation(world: World) -> None:
    with pytest.raises(Violation, match="goes back"):
        commit(
            world,
            owner(world).member.member_id,
            OffsetAndMetadata(world.group.stored[PARTITION].offset - 1),
        )


def test_commit_of_unprocessed_offsets_is_a_violation(world: World) -> None:
    with pytest.raises(Violation, match="no run has succeeded on it: it is lost"):
        commit(
            world, owner(world).member.member_id, OffsetAndMetadata(world.group.ends[PARTITION] + 1)
        )


def test_claim_that_disappears_is_a_violation(world: World) -> None:
    stored = world.group.stored[PARTITION]
    claim = Claim(stored.offset + 1_000, "b")
    world.group.stored[PARTITION] = encode(
        StoredPartition(stored.offset, (*decode(stored).claims, claim))
    )
    with pytest.raises(Violation, match="a claim is dropped without a commit"):
        commit(world, owner(world).member.member_id, stored)


def test_second_run_at_work_on_the_same_offsets_is_a_violation(world: World) -> None:
    dagster = world.dagster
    for _ in range(2):
        dagster.start("b", (OffsetRange(TOPIC, 0, 0, 5),))
    first, second = list(dagster.runs)[-2:]
    dagster.processes[first].is_working = True
    with pytest.raises(Violation, match="two live runs of b and b"):
        dagster._must_be_alone(dagster.runs[second])


def test_second_success_on_the_same_offsets_is_a_violation(world: World) -> None:
    start, until, _ = world.dagster.outputs.done[PARTITION][0]
    world.dagster.start("b", (OffsetRange(TOPIC, 0, start, until),))
    with pytest.raises(Violation, match="was materialized by"):
        world.dagster._succeed(list(world.dagster.runs)[-1])


def test_offset_that_no_run_has_processed_is_a_violation_at_the_end(world: World) -> None:
    world.dagster.outputs.done[PARTITION] = [
        entry for entry in world.dagster.outputs.done[PARTITION] if entry[0] > 0
    ]
    with pytest.raises(Violation, match="orders-0: offset 0 is in no successful run"):
        world.check_all_is_done()


def test_commit_that_is_not_recorded_is_a_violation_at_the_end(world: World) -> None:
    # A commit and its record are a moment apart: it may be in between just now.
    while any(owned.unrecorded for owned in owner(world).engine.partitions.values()):
        world.clockwork.run(0.1)
    world.check_is_recorded()
    world.dagster.recorded[PARTITION].pop(0)
    with pytest.raises(Violation, match="is recorded 0 times"):
        world.check_is_recorded()


def test_commit_that_is_recorded_twice_is_a_violation_at_the_end(world: World) -> None:
    world.dagster.recorded[PARTITION].append(world.dagster.recorded[PARTITION][0])
    with pytest.raises(Violation, match="is recorded 2 times"):
        world.check_is_recorded()


def test_check_that_keeps_failing_is_a_violation_at_the_end(world: World) -> None:
    world.dagster.stopped[PARTITION], world.dagster.stopped_said_by = (
        "an old reason",
        owner(world).incarnation,
    )
    with pytest.raises(Violation, match="still says that orders-0 is stopped"):
        world.check_nothing_is_shown_as_stopped()


def test_stop_that_is_not_shown_is_a_violation(world: World) -> None:
    process = owner(world)
    process.engine.partitions[PARTITION] = process.engine.partitions[PARTITION].changed(
        Change.STOP_CAUSED
    )
    world._check_stops_are_shown()
    world.clockwork.now += 100
    with pytest.raises(Violation, match="the check in Dagster does not show it"):
        world._check_stops_are_shown()


def test_done_work_that_is_not_committed_is_a_violation(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = owner(world)
    monkeypatch.setattr(OwnedPartition, "commit_write", lambda *_: None)
    while process.engine.partitions[PARTITION].committing is None:
        world.clockwork.run(1)
    world._check_commits_go_on(process)
    world.clockwork.now += 30
    with pytest.raises(Violation, match="does not commit orders-0"):
        world._check_commits_go_on(process)


def test_records_that_replace_lost_ones_must_be_processed(world: World) -> None:
    world.is_calm = True  # nothing more is produced
    end = world.group.ends[PARTITION]
    world.cut_off(PARTITION, world.dagster.outputs.done[PARTITION][0][1] - 1)
    world.group.ends[PARTITION] = end
    with pytest.raises(Violation, match="is in no successful run: it is lost"):
        world.check_all_is_done()


def test_commit_that_restarts_where_the_offset_vanished_is_a_violation(world: World) -> None:
    world.vanished[PARTITION] = world.group.stored.pop(PARTITION)
    with pytest.raises(Violation, match="goes back"):
        commit(world, owner(world).member.member_id, OffsetAndMetadata(0))


def test_violation_within_a_request_is_no_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record(*_: object) -> None:
        msg = "seen"
        raise Violation(msg)

    monkeypatch.setattr(SimulatedDagster, "record", record)
    assert play(QUIET).violation == "seen"
