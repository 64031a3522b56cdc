"""Launchers of runs: one that refuses runs while that is wanted, and one that stands for a cluster.

Owns what a run has in common with whoever launched it. On a cluster, say Kubernetes, that is
Dagster's storage alone: each run is the first process in a namespace of its own, has the
environment that it was given, and nobody sends it signals.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import dagster as dg

from proofs.chaos.exchange import FOLDER_VARIABLE, Exchange

_NAMESPACES = (
    ["unshare", "--pid", "--fork", "--mount-proc"],
    ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"],
)
"""Of process ids: as root, and as anybody. Not every machine allows it."""
_PASSED_ON = ("PATH", "HOME", "LANG", "PYTHONPYCACHEPREFIX")


class RefusingLauncher(dg.DefaultRunLauncher):
    """Launches runs as Dagster does by default, or refuses."""

    def launch_run(self, context: Any) -> None:
        """Launch a run.

        Raises:
            RuntimeError: Launches are refused at present.
        """
        if Exchange(Path(os.environ[FOLDER_VARIABLE])).refuses_launches:
            problem = "the launch of this run is refused because a fault was wanted"
            raise RuntimeError(problem)
        super().launch_run(context)


class DetachedLauncher(dg.DefaultRunLauncher):
    """Launches each run as a process that shares nothing with anybody but Dagster's storage.

    The process is the leader of a session, and the run in it the first process of a namespace where
    the machine allows that: so nobody can prove by its process id that it is gone. A cancel is only
    shown. Its log is `<folder>/<run id>.log`, and `<folder>/<run id>.pid` has its session.

    Args:
        env: The environment of the runs.
        folder: Where logs are written.
        inst_data: What Dagster needs to build it again.
    """

    def __init__(
        self,
        env: dict[str, str],
        folder: str,
        inst_data: Any = None,
    ) -> None:
        super().__init__(inst_data)
        self._env = env
        self._folder = Path(folder)

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        """What `dagster.yaml` says."""
        return {"env": dict, "folder": str}

    @classmethod
    def from_config_value(
        cls,
        inst_data: Any,
        config_value: Any,
    ) -> DetachedLauncher:
        """Build it as `dagster.yaml` says."""
        return cls(**config_value, inst_data=inst_data)

    def launch_run(self, context: Any) -> None:
        """Launch a run."""
        run = context.dagster_run
        given = {
            "__class__": "ExecuteRunArgs",
            "pipeline_origin": json.loads(dg.serialize_value(run.job_code_origin)),
            "pipeline_run_id": run.run_id,
            "instance_ref": json.loads(dg.serialize_value(self._instance.get_ref())),
            "set_exit_code_on_failure": None,
        }
        command = [sys.executable, "-m", "dagster", "api", "execute_run", json.dumps(given)]
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        with (self._folder / f"{run.run_id}.log").open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - Dagster's own command
                [*_namespace(), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**passed_on, **self._env},
                cwd=self._folder,
                start_new_session=True,
            )
        (self._folder / f"{run.run_id}.pid").write_text(str(process.pid))
        # What has ended stays in the list of processes until its parent has asked.
        threading.Thread(target=process.wait, name=f"end of run {run.run_id}", daemon=True).start()

    def terminate(self, run_id: str) -> bool:
        """Show that the run is to end; nobody tells its process."""
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        self._instance.report_run_canceling(run)
        return True


@cache
def _namespace() -> list[str]:
    """The beginning of a command that runs in a namespace of process ids of its own."""
    for command in _NAMESPACES if shutil.which("unshare") else ():
        if not subprocess.run([*command, "true"], check=False, capture_output=True).returncode:  # noqa: S603
            return command
    return []
