"""The fleet: which streaming runs a sensor starts, and which it asks to leave.

What a sensor starts, and asks to leave, follows from the runs that Dagster shows, and from nothing
that it has kept; a run whose process is gone was ended before, by its pulse. Owns the order of a
replacement. In each slot the new run joins the group first, and only then the old one is asked to
leave; one leaves at a time, so that each revoke waits for one batch. A new version that does not
come to work replaces nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.run import named_runs
from dagster_rebalance.core.runs.retry import RetryPace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LONG_S = 60.0
"""From then on it is said how long a run has been leaving."""
_QUEUED_LIMIT_S = 60.0
"""A run that waits in the queue for longer may wait for the very run that it is to replace."""
_AT_WORK_AFTER_S = 30.0
"""A run that has been ready for so long counts as at work: Kafka may leave its partitions with
those that have them, and gives it none before these have left. A member that Kafka refuses ends
sooner."""


@dataclass(frozen=True, slots=True)
class StreamSeen:
    """A streaming run as Dagster shows it. Times are in seconds since 1970.

    Attributes:
        run_id: The run.
        slot: Which of the wanted runs it is; None where a person has launched it.
        version: The version of the code that wanted it.
        created_at: When it was made, by the database, perhaps of another time zone: an order alone.
        started_at: When its process began; None before that.
        ended_at: When it ended; None while it is live.
        has_failed: Whether it ended badly.
        has_joined: Whether Kafka has assigned partitions to it.
        ready_since: Since when its member waits for partitions; None before that.
        queued_at: Since when it waits in Dagster's queue; None when it does not.
        leaving_since: When it was asked to leave, or cancelled; None when it was not.
    """

    run_id: str
    slot: int | None
    version: str
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    has_failed: bool = False
    has_joined: bool = False
    ready_since: float | None = None
    queued_at: float | None = None
    leaving_since: float | None = None

    @property
    def is_leaving(self) -> bool:
        """Whether it was asked to leave, or is being cancelled."""
        return self.leaving_since is not None

    @property
    def is_live(self) -> bool:
        """Whether it may still work."""
        return self.ended_at is None


@dataclass(frozen=True, slots=True)
class Replicas:
    """What is wanted.

    Attributes:
        runs: How many streaming runs.
        version: The version of the code.
        max_run_s: How old a run gets before it is replaced.
        leave_limit_s: How long the others wait for a run that is leaving: it may never end.
        pace: How long a slot waits after runs that ended badly.
    """

    runs: int
    version: str
    max_run_s: float = 3600.0
    leave_limit_s: float = 600.0
    pace: RetryPace = field(default_factory=RetryPace)


@dataclass(frozen=True, slots=True)
class Start:
    """A run to be started.

    Attributes:
        slot: Where.
        key: The key under which Dagster starts at most one run.
    """

    slot: int
    key: str


@dataclass(frozen=True, slots=True)
class Leave:
    """A run to be asked to leave, and why."""

    run_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What a tick does, and what it says."""

    starts: tuple[Start, ...] = ()
    leaves: tuple[Leave, ...] = ()
    notes: tuple[str, ...] = ()


def moves(fleet: Replicas, seen: Iterable[StreamSeen], now: float) -> Reconciliation:
    """Return what a tick has to do.

    Args:
        fleet: What is wanted.
        seen: The newest streaming runs, live and ended, in any order.
        now: In seconds since 1970.
    """
    runs = sorted(seen, key=lambda run: run.created_at)
    live = [run for run in runs if run.is_live]
    starts, notes = [], []
    surplus: list[tuple[StreamSeen, str]] = []
    for slot in range(fleet.runs):
        ours = [run for run in live if run.slot == slot]
        stays = next((run for run in reversed(ours) if _is_current(run, fleet, now)), None)
        old = [run for run in ours if run is not stays]
        if stays is None:
            before = [run for run in runs if run.slot == slot]
            wait = _wait(before, fleet, now)
            if wait:
                notes.append(f"slot {slot}: {wait}")
            else:
                last = before[-1].run_id if before else "none"
                # Not by the last run alone: people delete runs, and Dagster ignores a key that it
                # has seen.
                starts.append(Start(slot, f"{fleet.version}.{slot}.{last}.{now // 60:.0f}"))
        elif _is_at_work(stays, now) or _is_stuck(stays, live, fleet, now):
            surplus += [(run, _why(run, fleet, stays)) for run in old]
    surplus += [
        (run, f"{fleet.runs} runs are wanted")
        for run in live
        if run.slot is None or run.slot >= fleet.runs
    ]
    leaving = [run for run in live if run.leaving_since is not None]
    awaited = [run for run in leaving if _left_for_s(run, now) < fleet.leave_limit_s]
    waiting = [(run, why) for run, why in surplus if not run.is_leaving]
    leaves = [] if awaited else [Leave(run.run_id, why) for run, why in waiting[:1]]
    notes += [f"{named_runs([run.run_id])} is leaving{_for(run, now)}" for run in leaving]
    return Reconciliation(tuple(starts), tuple(leaves), tuple(notes))


def _is_current(run: StreamSeen, fleet: Replicas, now: float) -> bool:
    if run.is_leaving or run.version != fleet.version:
        return False
    return run.started_at is None or now - run.started_at < fleet.max_run_s


def _left_for_s(run: StreamSeen, now: float) -> float:
    return 0.0 if run.leaving_since is None else now - run.leaving_since


def _for(run: StreamSeen, now: float) -> str:
    left_s = _left_for_s(run, now)
    return f" for {left_s:.0f} s" if left_s >= _LONG_S else ""


def _is_at_work(run: StreamSeen, now: float) -> bool:
    """Whether the member of a run is in the group, as far as one can tell."""
    return run.has_joined or (
        run.ready_since is not None and now - run.ready_since >= _AT_WORK_AFTER_S
    )


def _is_stuck(run: StreamSeen, live: Sequence[StreamSeen], fleet: Replicas, now: float) -> bool:
    """Whether a run may wait in the queue for the very runs that it is to replace.

    One of them makes room for it, while all the others work.
    """
    working = sum(_is_at_work(other, now) and not other.is_leaving for other in live)
    waits_s = 0.0 if run.queued_at is None else now - run.queued_at
    return waits_s >= _QUEUED_LIMIT_S and working >= fleet.runs


def _wait(before: Sequence[StreamSeen], fleet: Replicas, now: float) -> str:
    """Why no run is started in a slot; empty when one is."""
    mine = [run for run in before if run.version == fleet.version and run.ended_at is not None]
    failed = []
    for run in reversed(mine):
        if not run.has_failed or _has_worked(run, fleet):
            break
        failed.append(run)
    if not failed or failed[0].ended_at is None:
        return ""
    left_s = failed[0].ended_at + fleet.pace.after_s(len(failed)) - now
    if left_s <= 0:
        return ""
    return (
        f"{len(failed)} run{'s' * (len(failed) > 1)} in a row ended badly, the last one is "
        f"{named_runs([failed[0].run_id])}; the next one is started in {left_s:.0f} s"
    )


def _has_worked(run: StreamSeen, fleet: Replicas) -> bool:
    """Whether a run lived long enough not to be counted with those before it."""
    return (
        run.started_at is not None
        and run.ended_at is not None
        and run.ended_at - run.started_at >= fleet.pace.limit_s
    )


def _why(run: StreamSeen, fleet: Replicas, stays: StreamSeen) -> str:
    successor = named_runs([stays.run_id])
    if run.version != fleet.version:
        return f"{successor} has newer code"
    return f"{successor} has taken its place"
