"""What a run was to do of its job, and what of that it did: people execute any part of a run again.

Owns how Dagster shows that. The plan of a run names all steps of its job, and those that it was
asked for; where assets were selected, the job itself is only a part, and the whole is known from
the other runs of the batch alone. Checks of assets are no part of a range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import dagster as dg

    from dagster_rebalance.core.model.run import RunSeen

UNKNOWN = "what its selection of assets has left out"
_PLANS_KEPT = 1_000
_DONE = {"SUCCESS", "SKIPPED"}


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan names the assets of each step that a run executes, and those of the whole job.

    A step without assets stands for itself.

    Attributes:
        asked: By step key.
        whole: None where the job of the run is a part of a job itself.
    """

    asked: dict[str, tuple[str, ...]]
    whole: frozenset[str] | None

    @property
    def names(self) -> frozenset[str]:
        """All that the run was asked for."""
        return frozenset(name for names in self.asked.values() for name in names)


class Coverage:
    """The coverage looks only at runs that may be a part of the job.

    A run that the sensor has requested costs nothing before it has succeeded.
    """

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._instance = instance
        self._plans: dict[str, Plan | None] = {}

    def added(self, runs: Sequence[tuple[dg.DagsterRun, RunSeen]]) -> Iterable[RunSeen]:
        """Return the runs, with the assets that each of them did and left out.

        The call adds them only where a run of the same batch has succeeded with a part of the job.
        """
        partial = {
            seen.batch_id
            for run, seen in runs
            if seen.has_succeeded and self._left_out(run, self._wholes(seen.batch_id, runs))
        }
        return [
            self._with_parts(run, seen, self._wholes(seen.batch_id, runs))
            if seen.batch_id in partial
            else seen
            for run, seen in runs
        ]

    def _with_parts(self, run: dg.DagsterRun, seen: RunSeen, whole: frozenset[str]) -> RunSeen:
        plan = self._plan(run)
        asked = plan.asked if plan else {}
        if seen.has_succeeded:
            unplanned = frozenset[str]() if _may_be_a_part(run) else whole
            return replace(
                seen, left_out=self._left_out(run, whole), done=plan.names if plan else unplanned
            )
        tried = {
            stats.step_key: stats.status for stats in self._instance.get_run_step_stats(run.run_id)
        }
        done = {
            key for key, status in tried.items() if status is not None and status.value in _DONE
        }
        return replace(
            seen,
            done=frozenset(name for key in done for name in asked.get(key, ())),
            undone=frozenset(name for key in tried.keys() - done for name in asked.get(key, ())),
        )

    def _left_out(self, run: dg.DagsterRun, whole: frozenset[str]) -> tuple[str, ...]:
        if not _may_be_a_part(run):
            return ()
        plan = self._plan(run)
        if plan is None:
            return (UNKNOWN,)
        known = whole if plan.whole is None else plan.whole
        return tuple(sorted(known - plan.names)) if known else (UNKNOWN,)

    def _wholes(
        self, batch_id: str, runs: Iterable[tuple[dg.DagsterRun, RunSeen]]
    ) -> frozenset[str]:
        """All assets of the job, as the runs of the batch show that are of the whole job."""
        parts = [run for run, seen in runs if seen.batch_id == batch_id]
        if not any(
            run.asset_selection or run.asset_check_selection or run.resolved_op_selection
            for run in parts
        ):
            return frozenset()  # each plan shows its own whole
        plans = (self._plan(run) for run in parts)
        return frozenset(name for plan in plans if plan and plan.whole for name in plan.whole)

    def _plan(self, run: dg.DagsterRun) -> Plan | None:
        """What a run was asked for; None where Dagster has no plan of it. It never changes."""
        if run.run_id not in self._plans:
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            self._plans[run.run_id] = self._read_plan(run)
        return self._plans[run.run_id]

    def _read_plan(self, run: dg.DagsterRun) -> Plan | None:
        if run.execution_plan_snapshot_id is None or run.job_snapshot_id is None:
            return None
        plan = self._instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id)
        names: dict[str, tuple[str, ...]] = {}
        for step in plan.steps:
            properties = [
                output.properties for output in step.outputs if output.properties is not None
            ]
            assets = tuple(
                found.asset_key.to_user_string()
                for found in properties
                if found.asset_key is not None
            )
            is_check = bool(properties) and all(
                found.asset_check_key is not None for found in properties
            )
            names[step.key] = () if is_check else assets or (step.key,)
        is_part = self._instance.get_job_snapshot(run.job_snapshot_id).lineage_snapshot is not None
        asked = {key: names.get(key, ()) for key in plan.step_keys_to_execute}
        return Plan(
            asked,
            None if is_part else frozenset(name for found in names.values() for name in found),
        )


def _may_be_a_part(run: dg.DagsterRun) -> bool:
    chosen = (
        run.step_keys_to_execute,
        run.asset_selection,
        run.asset_check_selection,
        run.resolved_op_selection,
    )
    return any(part is not None for part in chosen)
