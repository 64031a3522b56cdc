"""A schedule: a rough phase, a calm phase, and the departure of all members.

In the calm phase all records must be processed. The same seed gives the same trace on every
machine.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proofs.simulation.clockwork import Violation
from proofs.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.core.model.offsets import TopicPartition

_ROUGH_S = 40.0
_STANDSTILL_S = 600.0
_LEAVING_AT_MOST_S = 60.0
_LOOK_EVERY_S = 3.0
_SHOWN_WITHIN_S = 60.0
_BAD = 3
_SLOW_EVERY, _CROWD_EVERY = 7, 41
_FRAMES = 10_000
"""Waits nest: with Python's limit of 1,000 frames an action could fail for that alone, depending on
the caller."""


@dataclass(frozen=True, slots=True)
class Played:
    """The result of a schedule.

    Attributes:
        seed: Its seed.
        violation: The broken promise, or empty.
        trace: The events, one line each.
        rebalances: Number of rebalances.
        commits: Number of recorded commits.
    """

    seed: int
    violation: str
    trace: tuple[str, ...]
    rebalances: int
    commits: int


def has_streams(seed: int) -> bool:
    """Return whether a seed has streaming runs beside sensors: every third one."""
    return seed % 3 == 0


def has_ahead(seed: int) -> bool:
    """Return whether streaming runs claim their next batch ahead: in two thirds of theirs."""
    return seed % 9 != 0


def has_orders(seed: int) -> bool:
    """Return whether operators pause partitions: in every second schedule."""
    return seed % 2 == 0


def has_torn(seed: int) -> bool:
    """Return whether writes are torn and launchers hang: in every fifth schedule."""
    return seed % 5 == 1


def has_bad(seed: int) -> bool:
    """Return whether some records always raise, and are bisected: in every fifth schedule."""
    return seed % 5 == _BAD


def has_replicas(seed: int) -> bool:
    """Return whether code servers have two replicas, and member loops hang."""
    return seed % 4 == 1 and not has_streams(seed)


def has_slow_storage(seed: int) -> bool:
    """Return whether Dagster's storage is slow while commits go on: in every seventh schedule."""
    return seed % _SLOW_EVERY == 1


def has_crowd(seed: int) -> bool:
    """Return whether the topic has hundreds of partitions, which takes seconds to play."""
    return seed % _CROWD_EVERY == 1


def play(
    seed: int,
    *,
    rough_s: float = _ROUGH_S,
    streams: bool = False,
    orders: bool = False,
    parts: bool = False,
    torn: bool = False,
    replicas: bool = False,
    slow: bool = False,
    crowd: bool = False,
    ahead: bool = False,
    bad: bool = False,
) -> Played:
    """Play the schedule of a seed, with the chosen features."""
    world = World(
        seed,
        streams=streams,
        orders=orders,
        parts=parts,
        torn=torn,
        replicas=replicas,
        slow=slow,
        crowd=crowd,
        ahead=ahead,
        bad=bad,
    )
    violation = ""
    try:
        with _quiet(), _deep():
            _play(world, rough_s)
    except Violation as found:
        violation = str(found)
        world.clockwork.tell("VIOLATION", violation)
    finally:
        world.clockwork.stop()
    return Played(
        seed,
        violation,
        tuple(world.clockwork.trace),
        world.group.rebalances,
        sum(map(len, world.dagster.recorded.values())),
    )


def play_all_of(seed: int) -> Played:
    """Play the schedule of a seed with all of its features."""
    return play(
        seed,
        streams=has_streams(seed),
        orders=has_orders(seed),
        torn=has_torn(seed),
        replicas=has_replicas(seed),
        slow=has_slow_storage(seed),
        crowd=has_crowd(seed),
        ahead=has_ahead(seed),
        bad=has_bad(seed),
    )


def _play(world: World, rough_s: float) -> None:
    clockwork = world.clockwork
    clockwork.run(rough_s)
    world.calm()
    since: dict[tuple[TopicPartition, int] | None, float] = {}
    while not world.is_settled():
        # A long backlog has no deadline while each of its partitions progresses. The work after the
        # last commit has the same deadline.
        since = {
            standing: since.get(standing, clockwork.now)
            for standing in world.standing().items() or [None]
        }
        if clockwork.now - min(since.values()) > _STANDSTILL_S:
            msg = (
                f"nothing was committed for {_STANDSTILL_S:.0f} s of calm: "
                f"{world.why_not_settled()}"
            )
            raise Violation(msg)
        clockwork.run(_LOOK_EVERY_S)
    world.check_all_is_done()
    world.check_bad_records()
    world.check_is_recorded()
    if world.dagster.stopped:
        clockwork.run(_SHOWN_WITHIN_S)
    world.check_nothing_is_shown_as_stopped()
    world.leave()
    end = clockwork.now + _LEAVING_AT_MOST_S
    # Kafka forgets a member that was killed only when its session has timed out.
    while world.group.seats or any(not process.is_gone for process in world.processes):
        if clockwork.now > end:
            msg = (
                f"members do not leave: {world.why_not_settled()}; "
                f"the group has {len(world.group.seats)} left"
            )
            raise Violation(msg)
        clockwork.run(1.0)
    world.check_gauges()


@contextmanager
def _deep() -> Iterator[None]:
    """Raise the recursion limit for nested waits."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _FRAMES))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log: the trace has the requests that fail on purpose."""
    logger = logging.getLogger("dagster_rebalance")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
