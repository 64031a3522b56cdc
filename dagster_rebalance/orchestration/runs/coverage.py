"""Which assets of its job a run selected, and which of them succeeded.

Users may re-execute a part of a run. A partial success must never count as the whole batch. The
execution plan of a run has all steps of its job, and the selected steps. With an asset selection,
Dagster stores a reduced job with the run; the whole job is found in other runs of the batch. Asset
checks are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import dagster as dg

    from dagster_rebalance.core.model.run_snapshot import RunSnapshot

UNKNOWN = "assets outside its asset selection"
"""Stands in a list of assets for those that are not known."""
_PLANS_KEPT = 1_000
_DONE = {"SUCCESS", "SKIPPED"}
"""Dagster skips a step if an upstream step has not yielded an optional output."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run. A step without assets counts as an asset with its own name.

    Attributes:
        asked: The assets of each selected step, by step key.
        whole: All assets of the job; None if the job of the run is itself a part of a job.
    """

    asked: dict[str, tuple[str, ...]]
    whole: frozenset[str] | None

    @property
    def names(self) -> frozenset[str]:
        """All selected assets."""
        return frozenset(name for names in self.asked.values() for name in names)


class Coverage:
    """The coverage of runs. Plans are read only for batches of which a run may cover a part."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._instance = instance
        self._plans: dict[str, Plan | None] = {}

    def with_coverage(
        self, runs: Sequence[tuple[dg.DagsterRun, RunSnapshot]]
    ) -> Iterable[RunSnapshot]:
        """Return the runs, with their coverage if a run of the same batch succeeded in part."""
        partly_done = {
            seen.batch_id
            for run, seen in runs
            if seen.has_succeeded and self._left_out(run, self._assets_of_job(seen.batch_id, runs))
        }
        return [
            self._run_with_coverage(run, seen, self._assets_of_job(seen.batch_id, runs))
            if seen.batch_id in partly_done
            else seen
            for run, seen in runs
        ]

    def is_partial(self, run: dg.DagsterRun) -> bool:
        """Whether a run executes only some of the assets of its job, as far as its plan tells."""
        return bool(self._left_out(run, frozenset()))

    def _run_with_coverage(
        self, run: dg.DagsterRun, seen: RunSnapshot, whole: frozenset[str]
    ) -> RunSnapshot:
        plan = self._plan(run)
        asked = plan.asked if plan else {}
        if seen.has_succeeded:
            unplanned = frozenset[str]() if _may_be_a_part(run) else whole
            return replace(
                seen, left_out=self._left_out(run, whole), done=plan.names if plan else unplanned
            )
        begun = {
            stats.step_key: stats.status for stats in self._instance.get_run_step_stats(run.run_id)
        }
        done = {
            key for key, status in begun.items() if status is not None and status.value in _DONE
        }
        return replace(
            seen,
            done=frozenset(name for key in done for name in asked.get(key, ())),
            undone=frozenset(name for key in begun.keys() - done for name in asked.get(key, ())),
        )

    def _left_out(self, run: dg.DagsterRun, whole: frozenset[str]) -> tuple[str, ...]:
        if not _may_be_a_part(run):
            return ()
        plan = self._plan(run)
        if plan is None:
            return (UNKNOWN,)
        known = whole if plan.whole is None else plan.whole
        return tuple(sorted(known - plan.names)) if known else (UNKNOWN,)

    def _assets_of_job(
        self, batch_id: str, runs: Iterable[tuple[dg.DagsterRun, RunSnapshot]]
    ) -> frozenset[str]:
        """Return all assets of the job, from the runs of the batch that have the whole job."""
        runs_of_batch = [run for run, seen in runs if seen.batch_id == batch_id]
        if not any(map(_has_reduced_job, runs_of_batch)):
            return frozenset()  # each plan shows the whole job
        plans = (self._plan(run) for run in runs_of_batch)
        return frozenset(name for plan in plans if plan and plan.whole for name in plan.whole)

    def _plan(self, run: dg.DagsterRun) -> Plan | None:
        """Return the execution plan of a run, which never changes; None if Dagster has none."""
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
                one.asset_key.to_user_string() for one in properties if one.asset_key is not None
            )
            is_check = bool(properties) and all(
                one.asset_check_key is not None for one in properties
            )
            names[step.key] = () if is_check else assets or (step.key,)
        is_part = self._instance.get_job_snapshot(run.job_snapshot_id).lineage_snapshot is not None
        asked = {key: names.get(key, ()) for key in plan.step_keys_to_execute}
        whole = frozenset(name for assets in names.values() for name in assets)
        return Plan(asked, None if is_part else whole)


def _may_be_a_part(run: dg.DagsterRun) -> bool:
    return run.step_keys_to_execute is not None or _has_reduced_job(run)


def _has_reduced_job(run: dg.DagsterRun) -> bool:
    selections = (run.asset_selection, run.asset_check_selection, run.resolved_op_selection)
    return any(selection is not None for selection in selections)
