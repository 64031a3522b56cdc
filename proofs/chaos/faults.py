"""The faults: their kinds, and what becomes of each until it is mended.

Owns the kinds and the list of what is under way. What a fault does to the parts is in `on_members`,
`on_kafka`, `on_runs` and `on_storage`; which comes when is `draw.py`'s; what they explain is
`reasons.py`'s.
"""

from __future__ import annotations

import enum
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proofs.chaos.parts import MEMBERS

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    import dagster as dg

    from proofs.chaos.parts import Parts

_MOST_MEMBERS_AWAY = 2
_LOOK_S = 0.2


class Kind(enum.Enum):
    """What can go wrong."""

    MEMBER_KILLED = "member killed (SIGKILL), its runs live on"
    MEMBER_TERMINATED = "member terminated (SIGTERM), as in a deploy"
    MEMBER_FROZEN = "member frozen (SIGSTOP) past its session time-out"
    CODE_SERVER_KILLED = "code server killed together with its runs"
    CODE_SERVER_RELOADED = "code server reloaded"
    BROKER_KILLED = "broker killed and restarted"
    COORDINATOR_MOVED = "group coordinator moved"
    PARTITIONS_ADDED = "partition added"
    DAEMON_KILLED = "Dagster daemon killed"
    RUN_WORKER_KILLED = "run worker killed"
    RUN_FAILED = "run failed"
    RUN_DELETED = "run deleted in the UI"
    RUN_FORCE_TERMINATED = "run force-terminated in the UI"
    RUN_RE_EXECUTED_IN_PART = "one asset of a failed run re-executed in the UI"
    RUN_CUT_OFF_FROM_STORAGE = "run cut off from Dagster's storage while it works"
    LAUNCH_REFUSED = "launch of runs refused"
    OFFSETS_DELETED = "committed offsets of the second group deleted"
    TOPIC_MADE_ANEW = "topic of the second group made anew"
    SPARK_KILLED = "Spark Connect server killed"
    STORAGE_LOCKED = "Dagster's storage locked"
    STORAGE_HANGS = "Dagster's storage never answers"
    RUN_FROZEN = "run frozen (SIGSTOP) for less than its heartbeat time-out"
    RUN_FROZEN_LONG = "run frozen (SIGSTOP) past its heartbeat time-out"
    RUN_CANCELLED = "run cancelled in the UI"
    CODE_DEPLOYED = "new code deployed"
    CODE_SERVER_AWAY = "code server killed, the runs live on"


@dataclass
class Fault:
    """A fault that was done.

    Attributes:
        kind: What.
        target: To whom or what.
        began_at: When, in seconds since 1970.
        partitions: The numbers of the partitions that it may hold up; None for all.
        mended_at: When it was over.
    """

    kind: Kind
    target: str
    began_at: float = field(default_factory=time.time)
    partitions: frozenset[int] | None = field(default=None)
    mended_at: float | None = None

    def end(self, until: float) -> float:
        """When it was over, or `until` if it is not."""
        return until if self.mended_at is None else self.mended_at


def at_once() -> bool:
    """Due now."""
    return True


def nothing() -> None:
    """Nothing to mend."""


@dataclass
class UnderWay:
    """A fault that is to be mended.

    Attributes:
        fault: Which.
        is_due: Whether it is time.
        mend: What mends it.
        mended_at: When that was done; its error, if something does not come back.
    """

    fault: Fault
    is_due: Callable[[], bool] = at_once
    mend: Callable[[], None] = nothing
    mended_at: Future[float] = field(default_factory=Future)


@dataclass
class Ground:
    """What a fault is done to, and what it has to know.

    Attributes:
        parts: Everything that runs.
        chance: Draws targets and durations.
        owned: The numbers of the partitions that a member has.
        under_way: The faults that are not mended yet.
        deleted: The runs that were deleted, as they were before, each with the time.
    """

    parts: Parts
    chance: random.Random
    owned: Callable[[str], frozenset[int]]
    under_way: list[UnderWay] = field(default_factory=list)
    deleted: list[tuple[dg.RunRecord, float]] = field(default_factory=list)

    def suffers(self, *kinds: Kind) -> bool:
        """Whether a fault of one of the kinds is under way."""
        return any(one.fault.kind in kinds for one in self.under_way)

    def member(self, *names: str) -> str | None:
        """One of the code locations, at most two of which may be away at a time."""
        away = {one.fault.target for one in self.under_way} & set(MEMBERS)
        here = sorted(set(names) - away)
        return self.chance.choice(here) if here and len(away) < _MOST_MEMBERS_AWAY else None

    def after(self, shortest_s: float, longest_s: float) -> Callable[[], bool]:
        """Due after a drawn time."""
        due_at = time.monotonic() + self.chance.uniform(shortest_s, longest_s)
        return lambda: time.monotonic() >= due_at


class Faults:
    """Does faults to the parts.

    Args:
        ground: What they are done to.
        strikes: How each kind is done.

    Attributes:
        done: Every fault so far, oldest first.
    """

    def __init__(
        self, ground: Ground, strikes: Mapping[Kind, Callable[[Ground], UnderWay | None]]
    ) -> None:
        self.done: list[Fault] = []
        self._ground = ground
        self._strikes = strikes

    @property
    def under_way(self) -> list[UnderWay]:
        """The faults that are not mended yet."""
        return self._ground.under_way

    @property
    def deleted(self) -> list[tuple[dg.RunRecord, float]]:
        """The runs that were deleted, as they were before, each with the time."""
        return self._ground.deleted

    def strike(self, kind: Kind) -> Fault | None:
        """Do a fault; None when it cannot be done now."""
        one = self._strikes[kind](self._ground)
        if one is None:
            return None
        self.done.append(one.fault)
        if one.mend is nothing and one.is_due is at_once:
            one.fault.mended_at = one.fault.began_at
        else:
            # In a thread of its own: a strike may hang for as long as this fault lasts.
            threading.Thread(target=_mend_in_time, args=(one,), daemon=True).start()
            self.under_way.append(one)
        return one.fault

    def take_mended(self) -> list[Fault]:
        """Return the faults that were mended since the last call.

        Raises:
            DagsterRebalanceError: Something does not come back.
        """
        mended = [one for one in self.under_way if one.mended_at.done()]
        for one in mended:
            self.under_way.remove(one)
            one.fault.mended_at = one.mended_at.result()
        return [one.fault for one in mended]


def _mend_in_time(one: UnderWay) -> None:
    try:
        while not one.is_due():
            time.sleep(_LOOK_S)
        one.mend()
        one.mended_at.set_result(time.time())
    except Exception as problem:  # noqa: BLE001 - the play raises it
        one.mended_at.set_exception(problem)
