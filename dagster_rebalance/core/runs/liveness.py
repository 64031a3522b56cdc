"""Liveness: detection of dead runs, although nothing has reported their end.

A run sends heartbeats. Only a *change* of the heartbeat counts, measured on the observer's own
clock, so clocks need not agree. Time without an observation does not count, because a database
outage stops heartbeats as well. A deleted run is tracked until it is known to be over.
"""

# Theory of operation: the lease of a run
#
# Two processes must never work on one range. Dagster's status cannot guarantee that: run
# monitoring, a code server and people set it while the process of the run works on. So each run has
# a lease. `orchestration.runs.heartbeat` is the side of the run, and this module is the side of the
# members. With T = heartbeat_timeout_s:
#
#   run      0          a heartbeat is stored; another one follows every T/6
#   run      2T/3       no heartbeat could be stored since: the process interrupts its steps and
#                       stops its Spark jobs
#   run      2T/3+T/6   the process exits (`os._exit`), whatever its threads do
#   member   T          the heartbeat has not changed for T on the member's own clock, in at least
#                       four reads: the run is dead. The member ends its external work, marks the
#                       run as over, and requests the batch again.
#
# The run measures T from before it wrote the heartbeat, and the member from when it first read it.
# So the run ends at least T/6 before a member counts it as dead, and no two clocks are compared.
# Time without an observation does not count: a storage outage stops heartbeats as well.
#
# A lease ends earlier in two cases, which are proofs and not timeouts: the process reports that it
# is finished, or it ran on this machine and no longer exists (`is_gone`). A run that has not begun
# has written nothing, and needs no lease: its start check refuses it if it starts later.

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.run_snapshot import WORKING, RunSnapshot, RunState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

_LOOKS_PER_TIMEOUT = 4
"""Minimum number of observations without a new heartbeat before a run is dead."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as last observed.

    Attributes:
        age_s: Time since the last change of its heartbeat or, before the first one, of its state.
        is_reported: Whether the run was reported dead since that change.
        dead_since: When this member first reported the run dead.
    """

    run: RunSnapshot
    age_s: float = 0.0
    is_reported: bool = False
    dead_since: float | None = None


@dataclass(frozen=True, slots=True)
class Liveness:
    """Tracked runs and the age of their heartbeats.

    Attributes:
        heartbeat_timeout_s: A run that has begun to work is dead after this time without a new
            heartbeat, or after the longer timeout that it was started with.
        start_timeout_s: The timeout of a run that has not begun to work.
        tracked: Tracked runs by run id.
        observed_at: Time of the last observation.
    """

    heartbeat_timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    tracked: Mapping[str, TrackedRun] = field(default_factory=dict)
    observed_at: float = float("-inf")

    def with_deleted(
        self, runs: Iterable[RunSnapshot], batch_ids: Collection[str]
    ) -> tuple[RunSnapshot, ...]:
        """Add deleted runs of the batches to the runs that were read.

        A deleted run had begun to work and is no longer in Dagster.
        """
        read = tuple(runs)
        read_ids = {run.run_id for run in read}
        deleted = {
            run_id: replace(tracked_run.run, state=RunState.DELETED, is_over=False)
            for run_id, tracked_run in self.tracked.items()
            if run_id not in read_ids
            and tracked_run.run.batch_id in batch_ids
            and tracked_run.run.has_begun
        }
        return (*read, *deleted.values())

    def observe(self, runs: Iterable[RunSnapshot], now: float) -> tuple[Liveness, tuple[str, ...]]:
        """Return the liveness after reading all live runs, and the ids of dead runs.

        A dead run is reported again after a part of the timeout if it was not ended.
        """
        tracked = {}
        dead = []
        for run in runs:
            limit_s = self._limit_s(run)
            if limit_s is None:
                continue
            step_s = limit_s / _LOOKS_PER_TIMEOUT
            # The clock of a sensor may be set back, or be that of another machine.
            tracked_run = self._track(run, min(max(0.0, now - self.observed_at), step_s))
            if tracked_run.age_s >= limit_s or (run.is_gone and not tracked_run.is_reported):
                dead.append(run.run_id)
                since = now if tracked_run.dead_since is None else tracked_run.dead_since
                tracked_run = replace(
                    tracked_run, age_s=limit_s - step_s, is_reported=True, dead_since=since
                )
            tracked[run.run_id] = tracked_run
        return replace(self, tracked=tracked, observed_at=now), tuple(dead)

    def without(self, run_id: str) -> Liveness:
        """Stop tracking a run, after it was ended."""
        return replace(
            self,
            tracked={
                other_id: tracked_run
                for other_id, tracked_run in self.tracked.items()
                if other_id != run_id
            },
        )

    @property
    def batch_ids(self) -> frozenset[str]:
        """The batches with a run that has begun to work. The member must read all of their runs."""
        return frozenset(
            tracked_run.run.batch_id
            for tracked_run in self.tracked.values()
            if tracked_run.run.has_begun and tracked_run.run.batch_id
        )

    @property
    def unconfirmed(self) -> dict[str, float]:
        """Runs that ended in Dagster without a confirmation, with the seconds until dead."""
        return {
            run_id: max(0.0, self._heartbeat_limit_s(tracked_run.run) - tracked_run.age_s)
            for run_id, tracked_run in self.tracked.items()
            if not tracked_run.run.is_over
        }

    @property
    def reported_dead(self) -> frozenset[str]:
        """Runs that were reported dead and have sent no heartbeat since."""
        return frozenset(
            run_id for run_id, tracked_run in self.tracked.items() if tracked_run.is_reported
        )

    def not_ended(self, before: float) -> frozenset[str]:
        """Return runs that were first reported dead by `before` and are not ended yet."""
        return frozenset(
            run_id
            for run_id, tracked_run in self.tracked.items()
            if tracked_run.dead_since is not None and tracked_run.dead_since <= before
        )

    @property
    def serialized(self) -> str:
        """The state as text, for the next tick of a sensor: a new object is built in each tick."""
        tracked = [
            [
                run_id,
                tracked_run.run.state.value,
                tracked_run.run.heartbeat,
                tracked_run.age_s,
                tracked_run.is_reported,
            ]
            for run_id, tracked_run in self.tracked.items()
        ]
        return json.dumps({"observed_at": self.observed_at, "signs": tracked})

    def deserialized(self, memory: str | None) -> Liveness:
        """Parse the text of `serialized`, possibly after other lines; ignore unreadable text."""
        try:
            left: dict[str, Any] = json.loads((memory or "").rpartition("\n")[2])
            tracked = {
                str(run_id): TrackedRun(
                    RunSnapshot(str(run_id), "", (), RunState(state), heartbeat=str(heartbeat)),
                    float(age_s),
                    bool(is_reported),
                )
                for run_id, state, heartbeat, age_s, is_reported in left["signs"]
            }
            return replace(self, tracked=tracked, observed_at=float(left["observed_at"]))
        except (ValueError, TypeError, KeyError):
            return self

    def _track(self, run: RunSnapshot, step_s: float) -> TrackedRun:
        before = self.tracked.get(run.run_id)
        if (
            before is None
            or before.run.heartbeat != run.heartbeat
            or not (run.has_begun or before.run.state is run.state)
        ):
            return TrackedRun(run)
        return replace(before, run=run, age_s=before.age_s + step_s)

    def _limit_s(self, run: RunSnapshot) -> float | None:
        is_being_launched = run.state is RunState.STARTING or (
            run.state is RunState.STARTED and not run.has_begun
        )
        if is_being_launched or (run.state is RunState.CREATED and not run.is_requested):
            return self.start_timeout_s
        is_watched = run.state in WORKING or not run.is_over
        return self._heartbeat_limit_s(run) if is_watched else None

    def _heartbeat_limit_s(self, run: RunSnapshot) -> float:
        return max(self.heartbeat_timeout_s, run.heartbeat_timeout_s)
