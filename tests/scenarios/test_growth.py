"""The memory of a member does not grow with the number of rebalances."""

from __future__ import annotations

import gc
from collections import deque
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING

from dagster_rebalance.core.model import events
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.core.world import World, tp
from tests.kafka.consumers import CONFIG
from tests.scenarios.parts import SETTINGS, assign, revoke, start_all

if TYPE_CHECKING:
    from collections.abc import Callable

COLLECTIONS = (dict, list, set, frozenset, tuple, deque)
CODE = (type, ModuleType, FunctionType, BuiltinFunctionType)


def elements(root: object, *outside: object) -> int:
    """Return the number of elements in collections below an object, except in `outside`."""
    known = set(map(id, outside))
    todo, count = [root], 0
    while todo:
        each = todo.pop()
        if id(each) in known or isinstance(each, CODE):
            continue
        known.add(id(each))
        count += len(each) if isinstance(each, COLLECTIONS) else 0
        todo += gc.get_referents(each)
    return count


def grows(rebalance: Callable[[], None], count: Callable[[], int]) -> bool:
    """Whether there is more after some more rebalances."""
    for _ in range(10):
        rebalance()
    before = count()
    for _ in range(50):
        rebalance()
    return count() > before


def test_engine_memory_does_not_grow_over_dozens_of_rebalances() -> None:
    """Covers succeeded, failed, cancelled and lost runs, and revoked and lost partitions."""
    world = World(partitions=4)
    member = world.member(settings=SETTINGS)

    def rebalance() -> None:
        assign(member, 0, 1, 2, 3)
        for number in range(4):
            world.kafka.produce(tp(number), 5)
        ends_well, fails, *_ = start_all(world, member)
        world.succeed(ends_well)
        world.dagster.move(fails, RunState.FAILED)
        world.wait(2, member)
        revoke(member, 0, 1, 2)
        member.feed(events.PartitionsLost((tp(3),)))
        world.wait(40, member, step=1)
        assert not member.engine.partitions
        world.dagster.runs.clear()
        world.dagster.keys.clear()
        member.done.clear()

    assert not grows(rebalance, lambda: elements(member.engine, world, member))


def test_consumer_memory_does_not_grow_over_dozens_of_rebalances() -> None:
    """Covers delays, pauses, pending commits, hand-overs and, at the end, a loss."""
    group = FakeGroup({"orders": 4})
    member = group.member()
    blue = RebalanceAwareConsumer(
        CONFIG, fetch=False, member=member, cluster=group, clock=group.clock
    )
    blue.subscribe(["orders"])

    def rebalance() -> None:
        blue.poll(0.1)
        green = RebalanceAwareConsumer(
            CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
        )
        green.subscribe(["orders"])
        green.poll(0.1)
        blue.poll(0.1)
        asked_for = blue.get_to_be_revoked_partitions()
        assert asked_for
        blue.delay_revoke(asked_for)
        blue.pause(blue.assignment())
        blue.pause_topics(["orders"])
        blue.commit_async(
            dict.fromkeys(asked_for, OffsetAndMetadata(1)), lambda _offsets, _error: None
        )
        for _ in range(3):
            blue.poll(0.1)
        blue.resume(blue.assignment() | asked_for)
        blue.resume_topics(["orders"])
        green.poll(0.1)
        green.close()
        blue.poll(0.1)
        group.fence(member)
        blue.poll(0.1)
        assert len(blue.get_lost_partitions()) == 4
        blue.delay_revoke(blue.get_lost_partitions())

    assert not grows(rebalance, lambda: elements(blue, group, member))
