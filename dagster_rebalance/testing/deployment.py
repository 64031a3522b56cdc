"""A real Dagster deployment on this machine: daemon, webserver and code servers.

Each code location has its own code server, as in production, so a test can kill, shut down or
reload one while the others keep running.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.testing.dagster_ui import DagsterUi
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.local.host import accepts_connections, free_port
from dagster_rebalance.testing.processes import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

START_LIMIT_S = 240.0
_SCRIPTS = Path(sys.executable).parent

QUEUED = {
    "run_coordinator": {"module": "dagster.core.run_coordinator", "class": "QueuedRunCoordinator"}
}
AT_ONCE = {
    "run_coordinator": {"module": "dagster.core.run_coordinator", "class": "DefaultRunCoordinator"}
}
"""Runs start when they are requested: up to 5 s earlier than with the queue."""


@dataclass
class CodeLocation:
    """A code location and its server.

    Attributes:
        name: Name in Dagster.
        module: Module with the `Definitions`.
        folder: Folder of the module.
        env: Additional environment variables.
        reloads: Whether its server can reload the code (`dagster code-server`), as with
            `dagster dev`.
    """

    name: str
    module: str
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    reloads: bool = False
    port: int = field(default_factory=free_port)
    process: ChildProcess | None = field(init=False, default=None)
    _earlier: list[ChildProcess] = field(init=False, default_factory=list)

    @property
    def server(self) -> ChildProcess:
        """The running server.

        Raises:
            DagsterRebalanceError: The server is not started.
        """
        if self.process is None:
            msg = f"the code location {self.name} is not started"
            raise DagsterRebalanceError(msg)
        return self.process

    def start(self, home: Path) -> None:
        """Start or restart the server on its port. Runs of a killed server keep running."""
        self._earlier += [self.process] if self.process is not None else []
        command = ["code-server", "start"] if self.reloads else ["api", "grpc"]
        self.process = ChildProcess(
            f"code location {self.name}",
            [
                sys.executable,
                "-m",
                "dagster",
                *command,
                "-h",
                "127.0.0.1",
                "-p",
                str(self.port),
                "-m",
                self.module,
                "--location-name",
                self.name,
            ],
            log=home / f"{self.name}.log",
            env={"DAGSTER_HOME": str(home), "DAGSTER_DISABLE_TELEMETRY": "1", **self.env},
            cwd=self.folder,
        )

    def wait_until_ready(self) -> None:
        """Wait until the server answers."""
        self.server.wait_until_ready(
            lambda: accepts_connections(self.port), timeout_s=START_LIMIT_S
        )

    def stop_at_once(self) -> None:
        """Kill the server and its runs, also runs of earlier servers."""
        for process in (*self._earlier, *([self.process] if self.process is not None else [])):
            process.stop_at_once()
        self._earlier.clear()


class DagsterDeployment:
    """A Dagster deployment whose code locations share an instance.

    Example:
        ```python
        with DagsterDeployment(folder, [CodeLocation("blue", "shop.definitions", src)]) as dagster:
            dagster.ui.start_sensor("blue", "orders_sensor")
        ```

    Args:
        home: The DAGSTER_HOME folder.
        locations: The code locations.
        settings: Content of `dagster.yaml`; by default runs start without a queue.
        env: Additional environment variables of the daemon and the webserver.
    """

    def __init__(
        self,
        home: Path,
        locations: list[CodeLocation],
        *,
        settings: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.home = home
        self.locations = {location.name: location for location in locations}
        self.port = free_port()
        self.ui = DagsterUi(f"http://127.0.0.1:{self.port}")
        self._settings = {
            "telemetry": {"enabled": False},
            "nux": {"enabled": False},
            **(AT_ONCE if settings is None else settings),
        }
        self._env = {"DAGSTER_HOME": str(home), "DAGSTER_DISABLE_TELEMETRY": "1", **(env or {})}
        self._daemon: ChildProcess | None = None
        self._webserver: ChildProcess | None = None

    @property
    def daemon(self) -> ChildProcess:
        """The running daemon.

        Raises:
            DagsterRebalanceError: The daemon is not started.
        """
        if self._daemon is None:
            msg = "the daemon is not started"
            raise DagsterRebalanceError(msg)
        return self._daemon

    def instance(self) -> dg.DagsterInstance:
        """The instance, to be used as a context manager."""
        return dg.DagsterInstance.from_config(str(self.home))

    def start(self) -> Self:
        """Start the code servers, the daemon and the webserver, and wait until they answer."""
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "dagster.yaml").write_text(json.dumps(self._settings))
        servers = [
            {"grpc_server": {"host": "127.0.0.1", "port": o.port, "location_name": o.name}}
            for o in self.locations.values()
        ]
        workspace = self.home / "workspace.yaml"
        workspace.write_text(json.dumps({"load_from": servers}))
        # Processes that create the SQLite files concurrently corrupt them.
        with self.instance() as instance:
            instance.get_run_records(limit=1)
            instance.get_latest_materialization_event(dg.AssetKey("none"))
            instance.all_instigator_state()
        try:
            for location in self.locations.values():
                location.start(self.home)
            for location in self.locations.values():
                location.wait_until_ready()
            self.start_daemon()
            self._webserver = self._child(
                "webserver",
                [
                    "dagster-webserver",
                    "-h",
                    "127.0.0.1",
                    "-p",
                    str(self.port),
                    "-w",
                    str(workspace),
                ],
            )
            self._webserver.wait_until_ready(
                lambda: accepts_connections(self.port), timeout_s=START_LIMIT_S
            )
        except BaseException:
            self.stop()
            raise
        return self

    def start_daemon(self) -> None:
        """Start the daemon, or restart it after it was killed."""
        self._daemon = self._child(
            "daemon", ["dagster-daemon", "run", "-w", str(self.home / "workspace.yaml")]
        )

    def _child(self, name: str, command: list[str]) -> ChildProcess:
        return ChildProcess(
            name,
            [_SCRIPTS / command[0], *command[1:]],
            log=self.home / f"{name}.log",
            env=self._env,
            cwd=self.home,
        )

    def stop(self) -> None:
        """Kill the daemon and the webserver, then the code servers and their runs."""
        for process in (self._daemon, self._webserver):
            if process is not None:
                process.stop_at_once()
        for location in self.locations.values():
            location.stop_at_once()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_for_run(self, run_id: str, *, timeout_s: float) -> dg.DagsterRun:
        """Wait until a run has ended, and return it."""
        with self.instance() as instance:

            def ended() -> dg.DagsterRun | None:
                run = instance.get_run_by_id(run_id)
                return run if run is not None and run.is_finished else None

            return wait_until(
                ended, timeout_s=timeout_s, what=f"run {run_id} to end", interval_s=0.2
            )
