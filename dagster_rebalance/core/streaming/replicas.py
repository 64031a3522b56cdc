"""Replicas: which streaming runs a sensor starts, and which it asks to leave.

The decision follows from the runs that Dagster shows. In each slot the new run joins the group
before the old run is asked to leave, and one run leaves at a time, so each revoke waits for one
batch. A new version that never starts to work replaces no run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.run_snapshot import format_runs
from dagster_rebalance.core.runs.retry import RetryBackoff

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LONG_LEAVE_S = 60.0
_QUEUED_LIMIT_S = 60.0
"""If a run is queued for longer, it may wait for the run that it is to replace."""
_READY_LIMIT_S = 30.0
"""A run that has been ready for this time counts as working. Kafka may leave all partitions with
the old runs, and assigns none until they have left. A member that Kafka refuses ends sooner."""


@dataclass(frozen=True, slots=True)
class StreamingRun:
    """A streaming run as Dagster shows it. Times are in seconds since 1970.

    Attributes:
        slot: The number of the replica; None if an operator launched it.
        created_at: Set by the database, perhaps in another time zone: use it for the order only.
        ended_at: None while the run is live.
        has_joined: Whether Kafka has assigned partitions to the run.
        ready_since: When the run's member began to wait for partitions.
        leaving_since: When the run was asked to leave, or cancelled.
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
    """The wanted streaming runs.

    Attributes:
        max_run_s: The age at which a run is replaced.
        leave_limit_s: How long other runs wait for a leaving run, which may never end.
        backoff: How long a slot waits after failed runs.
    """

    runs: int
    version: str
    max_run_s: float = 3600.0
    leave_limit_s: float = 600.0
    backoff: RetryBackoff = field(default_factory=RetryBackoff)


@dataclass(frozen=True, slots=True)
class Start:
    """A run to start. Dagster starts at most one run per `key`."""

    slot: int
    key: str


@dataclass(frozen=True, slots=True)
class Leave:
    """A run to ask to leave, and why."""

    run_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The actions and notes of a tick."""

    starts: tuple[Start, ...] = ()
    leaves: tuple[Leave, ...] = ()
    notes: tuple[str, ...] = ()


def reconcile(replicas: Replicas, runs: Iterable[StreamingRun], now: float) -> Reconciliation:
    """Compare the wanted streaming runs with the live and the newest ended runs, in any order."""
    runs = sorted(runs, key=lambda run: run.created_at)
    live = [run for run in runs if run.is_live]
    starts, notes = [], []
    surplus: list[tuple[StreamingRun, str]] = []
    for slot in range(replicas.runs):
        in_slot = [run for run in live if run.slot == slot]
        stays = next((run for run in reversed(in_slot) if _is_current(run, replicas, now)), None)
        if stays is None:
            before = [run for run in runs if run.slot == slot]
            wait = _why_wait(before, replicas, now)
            if wait:
                notes.append(f"slot {slot}: {wait}")
            else:
                last = before[-1].run_id if before else "none"
                # The minute keeps the key new if newer runs were deleted: `last` then repeats.
                starts.append(Start(slot, f"{replicas.version}.{slot}.{last}.{now // 60:.0f}"))
        elif _is_working(stays, now) or _is_stuck(stays, live, replicas, now):
            successor = format_runs([stays.run_id])
            surplus += [
                (run, f"{successor} {_advantage(run, replicas)}")
                for run in in_slot
                if run is not stays
            ]
    surplus += [
        (run, f"{replicas.runs} runs are wanted")
        for run in live
        if run.slot is None or run.slot >= replicas.runs
    ]
    leaving = [run for run in live if run.is_leaving]
    is_awaited = any(_leaving_s(run, now) < replicas.leave_limit_s for run in leaving)
    waiting = [(run, why) for run, why in surplus if not run.is_leaving]
    leaves = [] if is_awaited else [Leave(run.run_id, why) for run, why in waiting[:1]]
    notes += [_leaving_note(run, now) for run in leaving]
    return Reconciliation(tuple(starts), tuple(leaves), tuple(notes))


def _is_current(run: StreamingRun, replicas: Replicas, now: float) -> bool:
    if run.is_leaving or run.version != replicas.version:
        return False
    return run.started_at is None or now - run.started_at < replicas.max_run_s


def _leaving_s(run: StreamingRun, now: float) -> float:
    return 0.0 if run.leaving_since is None else now - run.leaving_since


def _leaving_note(run: StreamingRun, now: float) -> str:
    leaving_s = _leaving_s(run, now)
    age = f" for {leaving_s:.0f} s" if leaving_s >= _LONG_LEAVE_S else ""
    return f"{format_runs([run.run_id])} is leaving{age}"


def _is_working(run: StreamingRun, now: float) -> bool:
    return run.has_joined or (
        run.ready_since is not None and now - run.ready_since >= _READY_LIMIT_S
    )


def _is_stuck(
    run: StreamingRun, live: Sequence[StreamingRun], replicas: Replicas, now: float
) -> bool:
    """Whether a run may be queued until the runs that it replaces end, while all of them work."""
    working = sum(_is_working(other, now) and not other.is_leaving for other in live)
    queued_s = 0.0 if run.queued_at is None else now - run.queued_at
    return queued_s >= _QUEUED_LIMIT_S and working >= replicas.runs


def _why_wait(before: Sequence[StreamingRun], replicas: Replicas, now: float) -> str:
    """Why no run is started in a slot; empty if a run is started."""
    ended = [r for r in before if r.version == replicas.version and r.ended_at is not None]
    failed = []
    for run in reversed(ended):
        if not run.has_failed or _has_worked(run, replicas):
            break
        failed.append(run)
    if not failed or failed[0].ended_at is None:
        return ""
    left_s = failed[0].ended_at + replicas.backoff.delay_s(len(failed)) - now
    if left_s <= 0:
        return ""
    return (
        f"{len(failed)} run{'s' * (len(failed) > 1)} in a row failed, the last one is "
        f"{format_runs([failed[0].run_id])}; the next one starts in {left_s:.0f} s"
    )


def _has_worked(run: StreamingRun, replicas: Replicas) -> bool:
    """Whether a run lived long enough to end a series of failed runs."""
    return (
        run.started_at is not None
        and run.ended_at is not None
        and run.ended_at - run.started_at >= replicas.backoff.limit_s
    )


def _advantage(run: StreamingRun, replicas: Replicas) -> str:
    return "has newer code" if run.version != replicas.version else "has taken its place"
