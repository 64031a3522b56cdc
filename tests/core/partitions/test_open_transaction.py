"""Transactions that stay open: records pile up behind them, and the partition looks idle."""

from __future__ import annotations

from dataclasses import replace

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.reporting.explain import explain_partition
from tests.core.world import Member, World, tp

LONGER_THAN_BROKERS_ALLOW_S = 1000.0


def behind_a_transaction() -> tuple[World, Member]:
    """A member that is at the first offset of a transaction with 30 records behind it."""
    world = World()
    member = world.member(owns=1, settings=EngineSettings(lease_s=100_000.0))
    world.kafka.bounds[tp(0)] = replace(world.kafka.bounds[tp(0)], high_watermark=30)
    world.wait(5, member)
    return world, member


def said(world: World, member: Member) -> str:
    """Return the member's explanation of orders-0."""
    return explain_partition(member.engine.partitions[tp(0)], world.now)


def test_open_transaction_is_explained() -> None:
    world, member = behind_a_transaction()
    assert "30 offsets wait for a transaction that has been open at offset 0 for 4 s" in said(
        world, member
    )
    world.kafka.bounds[tp(0)] = replace(world.kafka.bounds[tp(0)], high_watermark=None)
    world.wait(5, member)
    assert "30 offsets wait" in said(world, member), "the high watermark is not asked for each time"


def test_ended_transaction_is_dropped() -> None:
    world, member = behind_a_transaction()
    world.kafka.bounds[tp(0)] = replace(world.kafka.bounds[tp(0)], high_watermark=0)
    world.wait(5, member)
    assert said(world, member) == "orders-0: idle at the end, offset 0"


def test_hanging_transaction_stops_partition_until_aborted() -> None:
    world, member = behind_a_transaction()
    world.wait(LONGER_THAN_BROKERS_ALLOW_S, member, step=5)
    (shown,) = member.shown
    assert "30 records wait for a transaction that has been open at offset 0" in shown[1]
    assert "kafka-transactions abort" in shown[1]
    world.kafka.bounds[tp(0)] = replace(world.kafka.bounds[tp(0)], until=31, high_watermark=31)
    member.tick()
    world.wait(5, member)
    assert member.engine.partitions[tp(0)].phase is Phase.OWNED
    assert world.kafka.claims(0) == [(31, "b1")]
