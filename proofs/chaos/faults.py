"""The kinds of faults, and the faults in progress until they are repaired.

`on_members`, `on_kafka`, `on_runs`, `on_streams` and `on_storage` inject them, `draw` orders them,
and `reasons` derives the idleness that they explain.
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
    """The kinds of faults."""

    MEMBER_KILLED = "member killed (SIGKILL), its runs live on"
    MEMBER_TERMINATED = "member terminated (SIGTERM), as in a deploy"
    MEMBER_FROZEN = "member frozen (SIGSTOP) past its session timeout"
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
    RUN_FROZEN = "run frozen (SIGSTOP) for less than its heartbeat timeout"
    RUN_FROZEN_LONG = "run frozen (SIGSTOP) past its heartbeat timeout"
    RUN_CANCELLED = "run cancelled in the UI"
    CODE_DEPLOYED = "new code deployed"
    CODE_SERVER_AWAY = "code server killed, the runs live on"


@dataclass
class Fault:
    """An injected fault.

    Attributes:
        kind: The kind.
        target: The affected process.
        began_at: In seconds since 1970.
        partitions: Numbers of the partitions that it may delay; None for all.
        mended_at: Time of the repair.
    """

    kind: Kind
    target: str
    began_at: float = field(default_factory=time.time)
    partitions: frozenset[int] | None = field(default=None)
    mended_at: float | None = None

    def end(self, until: float) -> float:
        """Return the time of the repair, or `until` if there is none yet."""
        return until if self.mended_at is None else self.mended_at


def at_once() -> bool:
    """Due immediately."""
    return True


def nothing() -> None:
    """Repair nothing."""


@dataclass
class UnderWay:
    """A fault in progress.

    Attributes:
        fault: The fault.
        is_due: Returns whether the repair is due.
        mend: Repairs it.
        mended_at: Result of the repair: its time, or its error.
    """

    fault: Fault
    is_due: Callable[[], bool] = at_once
    mend: Callable[[], None] = nothing
    mended_at: Future[float] = field(default_factory=Future)


@dataclass
class Ground:
    """The state that faults need.

    Attributes:
        parts: All processes.
        chance: Draws targets and durations.
        owned: Returns the numbers of a member's partitions.
        under_way: Faults in progress.
        deleted: Deleted runs with the time of their deletion.
    """

    parts: Parts
    chance: random.Random
    owned: Callable[[str], frozenset[int]]
    under_way: list[UnderWay] = field(default_factory=list)
    deleted: list[tuple[dg.RunRecord, float]] = field(default_factory=list)

    def suffers(self, *kinds: Kind) -> bool:
        """Return whether a fault of one of the kinds is in progress."""
        return any(one.fault.kind in kinds for one in self.under_way)

    def member(self, *names: str) -> str | None:
        """Draw a code location; at most two may be away at a time."""
        away = {one.fault.target for one in self.under_way} & set(MEMBERS)
        here = sorted(set(names) - away)
        return self.chance.choice(here) if here and len(away) < _MOST_MEMBERS_AWAY else None

    def after(self, shortest_s: float, longest_s: float) -> Callable[[], bool]:
        """Return a condition that is true after a random time."""
        due_at = time.monotonic() + self.chance.uniform(shortest_s, longest_s)
        return lambda: time.monotonic() >= due_at


class Faults:
    """Injects faults.

    Args:
        ground: The state that faults need.
        strikes: Injects each kind.

    Attributes:
        done: All faults, oldest first.
    """

    def __init__(
        self, ground: Ground, strikes: Mapping[Kind, Callable[[Ground], UnderWay | None]]
    ) -> None:
        self.done: list[Fault] = []
        self._ground = ground
        self._strikes = strikes

    @property
    def under_way(self) -> list[UnderWay]:
        return self._ground.under_way

    @property
    def deleted(self) -> list[tuple[dg.RunRecord, float]]:
        return self._ground.deleted

    def strike(self, kind: Kind) -> Fault | None:
        """Inject a fault; return None if it is not possible now."""
        one = self._strikes[kind](self._ground)
        if one is None:
            return None
        self.done.append(one.fault)
        if one.mend is nothing and one.is_due is at_once:
            one.fault.mended_at = one.fault.began_at
        else:
            # In a separate thread: a strike may hang for as long as this fault lasts.
            threading.Thread(target=_mend_in_time, args=(one,), daemon=True).start()
            self.under_way.append(one)
        return one.fault

    def take_mended(self) -> list[Fault]:
        """Return the faults that were repaired since the last call.

        Raises:
            DagsterRebalanceError: A process does not recover.
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
