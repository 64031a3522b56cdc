"""The pulse finds runs that do no work any more and are not known to be over.

Dagster shows such a run at work, or nobody has said that it is over. A run gives a sign of life
from time to time. The pulse looks only at whether the sign *changes*, on the observer's own clock,
so that clocks of different machines need not agree. Time in which nobody looked does not count: a
database that was away kept the runs from giving signs too.

Dagster's status alone ends no run that has begun its work, since its code server, run monitoring
and people write it too. The pulse names such a run when its own process has said that it is
finished, when that process is known to be gone, or when it gave no sign for the time-out. The
member stops what a named run has begun elsewhere and marks it as over. It watches a deleted run on,
until it knows the same of it.
"""

# Theory of operation: the lease of a run
#
# Two processes must never work on one range. Dagster's status cannot guarantee that: run
# monitoring, a code server and people set it while the process of the run works on. So each run has
# a lease. `orchestration.runs.heartbeat` is the side of the run, and this module is the side of the
# members. With T = heartbeat_timeout_s:
#
#   run      0          a heartbeat is stored; the next one follows every T/6
#   run      2T/3       no heartbeat could be stored since: the process interrupts its body and
#                       stops its Spark work
#   run      2T/3+T/6   the process exits (`os._exit`), whatever its threads do
#   member   T          the heartbeat has not changed for T on the member's own clock, in at least
#                       four looks: the run is dead. The member ends its external work, marks the
#                       run as over, and requests the batch again.
#
# The run measures T from before it wrote the heartbeat, and the member from when it first read it.
# So the run ends at least T/6 before a member counts it as dead, and no two clocks are compared.
# Time without a look does not count for the member: a storage outage stops heartbeats as well.
#
# A lease ends earlier in two cases, both of which are proofs and no time-outs: the process reports
# that it is finished, or it ran on this machine and no longer exists (`is_gone`). A run that has
# not begun has touched nothing, and needs no lease: it refuses itself when it starts.

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.run import WORKING, RunSeen, RunState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

_LOOKS_PER_TIMEOUT = 4
"""How often a run must have been seen without a new sign, at least, before it is dead."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A run as it was seen last, and for how long it has shown nothing else.

    Attributes:
        run: The run.
        age_s: How long its sign of life, or its state before the first one, has not changed.
        is_named: Whether it was named as dead since.
        dead_since: When this member named it first; None before that.
    """

    run: RunSeen
    age_s: float = 0.0
    is_named: bool = False
    dead_since: float | None = None


@dataclass(frozen=True, slots=True)
class Liveness:
    """The last sign of each run and its age.

    Attributes:
        heartbeat_timeout_s: A run that has begun its work and shows the same sign for this long
            is dead. One that was told a longer time-out when it began may be silent for as long as
            that: it gives signs more rarely, and stops itself later.
        start_timeout_s: The same for a run that has not begun yet.
        signs: By run id.
        observed_at: When the runs were last looked at.
    """

    heartbeat_timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    signs: Mapping[str, Sign] = field(default_factory=dict)
    observed_at: float = float("-inf")

    def completed(self, runs: Iterable[RunSeen], batch_ids: Collection[str]) -> tuple[RunSeen, ...]:
        """Return the runs that were read, with deleted runs of the same batches.

        A deleted run is one that has begun its work and is not in Dagster any more.
        """
        read = tuple(runs)
        found = {run.run_id for run in read}
        deleted = {
            run_id: replace(sign.run, state=RunState.DELETED, is_over=False)
            for run_id, sign in self.signs.items()
            if run_id not in found and sign.run.batch_id in batch_ids and sign.run.has_begun
        }
        return (*read, *deleted.values())

    def observe(self, runs: Iterable[RunSeen], now: float) -> tuple[Liveness, tuple[str, ...]]:
        """The pulse after looking at all live runs, and the ids of those that are dead.

        A dead run is named again after a part of the time-out, in case it could not be ended.
        """
        signs = {}
        dead = []
        for run in runs:
            limit_s = self._limit_s(run)
            if limit_s is None:
                continue
            step_s = limit_s / _LOOKS_PER_TIMEOUT
            # The clock of a sensor may be set back, or be that of another machine.
            sign = self._aged(run, min(max(0.0, now - self.observed_at), step_s))
            if sign.age_s >= limit_s or (run.is_gone and not sign.is_named):
                dead.append(run.run_id)
                since = now if sign.dead_since is None else sign.dead_since
                sign = replace(sign, age_s=limit_s - step_s, is_named=True, dead_since=since)
            signs[run.run_id] = sign
        return replace(self, signs=signs, observed_at=now), tuple(dead)

    def without(self, run_id: str) -> Liveness:
        """The pulse after a dead run was ended: one that was deleted is not watched any more."""
        return replace(
            self, signs={known: sign for known, sign in self.signs.items() if known != run_id}
        )

    @property
    def batch_ids(self) -> frozenset[str]:
        """Return the batches of the runs that have begun their work.

        The member reads all runs of these batches, to see what becomes of them.
        """
        return frozenset(
            sign.run.batch_id
            for sign in self.signs.values()
            if sign.run.has_begun and sign.run.batch_id
        )

    @property
    def unconfirmed(self) -> dict[str, float]:
        """Return the runs that ended in Dagster and are not known to be over.

        Each comes with the seconds until it counts as dead.
        """
        return {
            run_id: max(0.0, self._heartbeat_limit_s(sign.run) - sign.age_s)
            for run_id, sign in self.signs.items()
            if not sign.run.is_over
        }

    @property
    def named(self) -> frozenset[str]:
        """Return the runs that were named as dead, and have given no sign since."""
        return frozenset(run_id for run_id, sign in self.signs.items() if sign.is_named)

    def not_ended(self, before: float) -> frozenset[str]:
        """Return the runs that were named as dead before a time, and could not be ended since."""
        return frozenset(
            run_id
            for run_id, sign in self.signs.items()
            if sign.dead_since is not None and sign.dead_since <= before
        )

    @property
    def memory(self) -> str:
        """Return what the next look needs, as text: a sensor lives for one tick."""
        signs = [
            [run_id, sign.run.state.value, sign.run.heartbeat, sign.age_s, sign.is_named]
            for run_id, sign in self.signs.items()
        ]
        return json.dumps({"observed_at": self.observed_at, "signs": signs})

    def remembering(self, memory: str | None) -> Liveness:
        """The pulse with what an earlier look has left; without it, if that cannot be read.

        A sentence may stand before it, on a line of its own.
        """
        try:
            left: dict[str, Any] = json.loads((memory or "").rpartition("\n")[2])
            signs = {
                str(run_id): Sign(
                    RunSeen(str(run_id), "", (), RunState(state), heartbeat=str(heartbeat)),
                    float(age_s),
                    bool(is_named),
                )
                for run_id, state, heartbeat, age_s, is_named in left["signs"]
            }
            return replace(self, signs=signs, observed_at=float(left["observed_at"]))
        except (ValueError, TypeError, KeyError):
            return self

    def _aged(self, run: RunSeen, step_s: float) -> Sign:
        before = self.signs.get(run.run_id)
        if (
            before is None
            or before.run.heartbeat != run.heartbeat
            or not (run.has_begun or before.run.state is run.state)
        ):
            return Sign(run)
        return replace(before, run=run, age_s=before.age_s + step_s)

    def _limit_s(self, run: RunSeen) -> float | None:
        is_being_launched = run.state is RunState.STARTING or (
            run.state is RunState.STARTED and not run.has_begun
        )
        if is_being_launched or (run.state is RunState.CREATED and not run.is_requested):
            return self.start_timeout_s
        is_watched = run.state in WORKING or not run.is_over
        return self._heartbeat_limit_s(run) if is_watched else None

    def _heartbeat_limit_s(self, run: RunSeen) -> float:
        return max(self.heartbeat_timeout_s, run.heartbeat_timeout_s)
