"""Builders of the in-memory scenarios: a member with live runs, and a revoke."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.batches.engine_settings import EngineSettings, HoldBudget
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import events
from dagster_rebalance.core.runs.liveness import Liveness
from tests.core.world import Member, World, tp

if TYPE_CHECKING:
    from dagster_rebalance.core.model import commands

SETTINGS = EngineSettings(
    limits=BatchLimits(max_ranges_per_run=1),
    budget=HoldBudget(30, 5),
    lease_s=10_000,
    liveness=Liveness(heartbeat_timeout_s=10_000),
)
"""One run per partition, a hold of 30 s, no leases and no dead runs."""


def at_work(
    partitions: int = 1, *, settings: EngineSettings = SETTINGS, records: int = 100
) -> tuple[World, Member, list[str]]:
    """Return a member with a live run on each of its partitions, in order."""
    world = World(records=records, partitions=partitions)
    member = world.member(owns=partitions, settings=settings)
    return world, member, start_all(world, member)


def start_all(world: World, member: Member) -> list[str]:
    """Claim all records, and start the runs in the order of their ranges."""
    world.wait(1.25, member)
    runs = sorted(member.tick(), key=lambda run_id: world.dagster.runs[run_id].ranges)
    for run_id in runs:
        assert world.start(run_id) is None
    world.wait(1, member)
    return runs


def revoke(member: Member, *numbers: int) -> list[commands.Command]:
    """Kafka asks for partitions back."""
    return member.feed(events.RevokeRequested(tuple(map(tp, numbers))))


def assign(member: Member, *numbers: int) -> list[commands.Command]:
    """Kafka gives partitions."""
    return member.feed(events.PartitionsAssigned(tuple(map(tp, numbers))))


def outputs(world: World) -> dict[tuple[int, int, int], int]:
    """How often each range was written by a run that succeeded."""
    return {
        (range_.partition, range_.start, range_.until): times
        for range_, times in world.output.items()
    }
