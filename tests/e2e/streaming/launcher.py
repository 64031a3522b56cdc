"""A run launcher that launches the runs of one job as a cluster does."""

from __future__ import annotations

from typing import Any

import dagster as dg

from proofs.chaos.launcher import DetachedLauncher


class LauncherByJob(DetachedLauncher):
    """Launches the runs of one job detached, and all others as Dagster's default launcher does.

    Args:
        job: The job.
        env: Environment of its runs.
        folder: Folder of the logs of its runs.
        inst_data: Dagster's data to rebuild the launcher.
    """

    def __init__(
        self,
        job: str,
        env: dict[str, str],
        folder: str,
        inst_data: Any = None,  # noqa: ANN401 - an internal type of Dagster
    ) -> None:
        super().__init__(env, folder, inst_data)
        self._job = job

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        return {"job": str, **super().config_type()}

    def launch_run(self, context: Any) -> None:  # noqa: ANN401 - an internal type of Dagster
        if context.dagster_run.job_name == self._job:
            super().launch_run(context)
        else:
            dg.DefaultRunLauncher.launch_run(self, context)

    def terminate(self, run_id: str) -> bool:
        run = self._instance.get_run_by_id(run_id)
        if run is not None and run.job_name == self._job:
            return super().terminate(run_id)
        return bool(dg.DefaultRunLauncher.terminate(self, run_id))  # type: ignore[no-untyped-call]
