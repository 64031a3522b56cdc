"""Run launchers: one that refuses runs on request, and one that behaves like a cluster.

A run on a cluster shares only Dagster's storage with its launcher: it is the first process of its
own pid namespace, has its own environment, and receives no signals.
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
"""Commands for a pid namespace, as root and as another user. Not every machine allows them."""
_PASSED_ON = ("PATH", "HOME", "LANG", "PYTHONPYCACHEPREFIX")


class RefusingLauncher(dg.DefaultRunLauncher):
    """Launches runs as Dagster's default launcher does, or refuses."""

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
    """Launches each run as a process that shares only Dagster's storage.

    The process leads a session and, if the machine allows it, has its own pid namespace, so no pid
    proves its end. A cancellation is only recorded. The log is `<folder>/<run id>.log`, and
    `<folder>/<run id>.pid` has the session.

    Args:
        env: Environment of the runs.
        folder: Folder of the logs.
        inst_data: Dagster's data to rebuild the launcher.
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
        return {"env": dict, "folder": str}

    @classmethod
    def from_config_value(
        cls,
        inst_data: Any,
        config_value: Any,
    ) -> DetachedLauncher:
        return cls(**config_value, inst_data=inst_data)

    def launch_run(self, context: Any) -> None:
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
        # An ended process stays in the list of processes until its parent waits for it.
        threading.Thread(target=process.wait, name=f"end of run {run.run_id}", daemon=True).start()

    def terminate(self, run_id: str) -> bool:
        """Record that the run shall end, without a signal to its process."""
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        self._instance.report_run_canceling(run)
        return True


@cache
def _namespace() -> list[str]:
    """Return the command prefix for a pid namespace."""
    for command in _NAMESPACES if shutil.which("unshare") else ():
        if not subprocess.run([*command, "true"], check=False, capture_output=True).returncode:  # noqa: S603
            return command
    return []
