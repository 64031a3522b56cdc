"""A real Dagster deployment on this machine: code servers, the daemon and, if wanted, the webserver, in a folder of its own.

Owns how they are started, reached, reloaded and ended. Each code location has a code server of its own, as in production, so that one can
be killed, shut down as in a deploy, or reloaded while the others go on.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.errors import DagsterRebalanceError
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.ports import accepts_connections, free_port
from dagster_rebalance.testing.processes import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

START_LIMIT_S = 120.0
_SCRIPTS = Path(sys.executable).parent

QUEUED = {"run_coordinator": {"module": "dagster.core.run_coordinator", "class": "QueuedRunCoordinator"}}
AT_ONCE = {"run_coordinator": {"module": "dagster.core.run_coordinator", "class": "DefaultRunCoordinator"}}
"""Runs start when they are requested: without the queue a run begins up to 5 s earlier."""


@dataclass
class CodeLocation:
    """A code location and its server.

    Attributes:
        name: The name in Dagster.
        module: The module with its `Definitions`.
        env: What is different in its environment.
        reloads: Whether its server can load the code again (`dagster code-server`), as with `dagster dev`.
        folder: The folder that the module is found in.
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
            DagsterRebalanceError: It was not started.
        """
        if self.process is None:
            msg = f"the code location {self.name} is not started"
            raise DagsterRebalanceError(msg)
        return self.process

    def start(self, home: Path) -> None:
        """Start the server, on the same port as before if there was one. Runs of one that was killed go on."""
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
        self.server.wait_until_ready(lambda: accepts_connections(self.port), timeout_s=START_LIMIT_S)

    def stop_at_once(self) -> None:
        """End the server and its runs, also those that outlived an earlier server."""
        for process in (*self._earlier, *([self.process] if self.process is not None else [])):
            process.stop_at_once()
        self._earlier.clear()


class DagsterDeployment:
    """Dagster with code locations that share an instance.

    Example:
        ```python
        with DagsterDeployment(folder, [CodeLocation("blue", "shop.definitions", src)]) as dagster:
            dagster.start_sensor("blue", "orders_sensor")
        ```

    Args:
        home: The folder that becomes DAGSTER_HOME.
        locations: The code locations.
        settings: What `dagster.yaml` says; by default runs start without a queue.
        env: What is different in the environment of the daemon and the webserver.
    """

    def __init__(
        self, home: Path, locations: list[CodeLocation], *, settings: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.home = home
        self.locations = {location.name: location for location in locations}
        self.port = free_port()
        self._settings = {"telemetry": {"enabled": False}, "nux": {"enabled": False}, **(AT_ONCE if settings is None else settings)}
        self._env = {"DAGSTER_HOME": str(home), "DAGSTER_DISABLE_TELEMETRY": "1", **(env or {})}
        self._daemon: ChildProcess | None = None
        self._webserver: ChildProcess | None = None

    @property
    def url(self) -> str:
        """Where the UI is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def daemon(self) -> ChildProcess:
        """The running daemon.

        Raises:
            DagsterRebalanceError: It was not started.
        """
        if self._daemon is None:
            msg = "the daemon is not started"
            raise DagsterRebalanceError(msg)
        return self._daemon

    def instance(self) -> dg.DagsterInstance:
        """The instance, to be used as a context manager."""
        return dg.DagsterInstance.from_config(str(self.home))

    def start(self) -> Self:
        """Start everything, and wait until it answers."""
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "dagster.yaml").write_text(json.dumps(self._settings))
        servers = [{"grpc_server": {"host": "127.0.0.1", "port": o.port, "location_name": o.name}} for o in self.locations.values()]
        workspace = self.home / "workspace.yaml"
        workspace.write_text(json.dumps({"load_from": servers}))
        with self.instance() as instance:  # several processes that make the SQLite files at the same time break them
            instance.get_run_records(limit=1)
            instance.get_latest_materialization_event(dg.AssetKey("none"))
            instance.all_instigator_state()
        try:
            for location in self.locations.values():
                location.start(self.home)
            for location in self.locations.values():
                location.wait_until_ready()
            self.start_daemon()
            self._webserver = self._child("webserver", ["dagster-webserver", "-h", "127.0.0.1", "-p", str(self.port), "-w", str(workspace)])
            self._webserver.wait_until_ready(lambda: accepts_connections(self.port), timeout_s=START_LIMIT_S)
        except BaseException:
            self.stop()
            raise
        return self

    def start_daemon(self) -> None:
        """Start the daemon; also after it was killed."""
        self._daemon = self._child("daemon", ["dagster-daemon", "run", "-w", str(self.home / "workspace.yaml")])

    def _child(self, name: str, command: list[str]) -> ChildProcess:
        return ChildProcess(
            name,
            [_SCRIPTS / command[0], *command[1:]],
            log=self.home / f"{name}.log",
            env=self._env,
            cwd=self.home,
        )

    def stop(self) -> None:
        """End everything: first who starts runs, then the code servers and the runs in them."""
        for process in (self._daemon, self._webserver):
            if process is not None:
                process.stop_at_once()
        for location in self.locations.values():
            location.stop_at_once()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def ask(self, query: str, **variables: object) -> dict[str, Any]:
        """Ask the webserver's GraphQL.

        Raises:
            DagsterRebalanceError: It refused the query.
        """
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"Content-Type": "application/json"})  # noqa: S310 - our own server
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            answer = json.load(response)
        if answer.get("errors"):
            msg = f"Dagster's webserver refused the query: {answer['errors']}"
            raise DagsterRebalanceError(msg)
        data: dict[str, Any] = answer["data"]
        return data

    def start_sensor(self, location: str, sensor: str) -> None:
        """Turn a sensor on."""
        self._settle(_START_SENSOR, "startSensor", selector=_selector(location, sensor))

    def stop_sensor(self, location: str, sensor: str) -> None:
        """Turn a sensor off."""
        state = self.ask(_SENSOR, selector=_selector(location, sensor))["sensorOrError"]["sensorState"]
        self._settle(_STOP_SENSOR, "stopSensor", id=state["id"])

    def ticks(self, location: str, sensor: str, limit: int = 20) -> list[dict[str, Any]]:
        """The last ticks of a sensor, newest first."""
        sensor_found = self.ask(_SENSOR, selector=_selector(location, sensor), limit=limit)["sensorOrError"]
        ticks: list[dict[str, Any]] = sensor_found["sensorState"]["ticks"]
        return ticks

    def preview(self, location: str, sensor: str) -> dict[str, Any]:
        """Do what "Preview tick result" does in the UI."""
        answer = self.ask(_PREVIEW, selector=_selector(location, sensor), cursor=None)["sensorDryRun"]
        result: dict[str, Any] = answer["evaluationResult"]
        return result

    def reload(self, location: str) -> None:
        """Load the code of a location again, as "Reload definitions" does in the UI."""
        self._settle(_RELOAD, "reloadRepositoryLocation", location=location)

    def re_execute(self, run_id: str, steps: Sequence[str] = ()) -> None:
        """Run all steps of a run again, as "Re-execute all" does in the UI, or only some of them."""
        if not steps:
            self._settle(_RE_EXECUTE, "launchRunReexecution", run_id=run_id)
            return
        run = self.ask(_RUN, run_id=run_id)["runOrError"]
        origin = run["repositoryOrigin"]
        tags = [tag for tag in run["tags"] if not tag["key"].startswith("dagster/") and not tag["key"].startswith(".dagster/")]
        execution = {
            "selector": {
                "repositoryLocationName": origin["repositoryLocationName"],
                "repositoryName": origin["repositoryName"],
                "jobName": run["jobName"],
            },
            "runConfigData": run["runConfigYaml"],
            "mode": "default",
            "stepKeys": list(steps),
            "executionMetadata": {"parentRunId": run_id, "rootRunId": run["rootRunId"] or run_id, "tags": tags},
        }
        self._settle(_RE_EXECUTE_STEPS, "launchRunReexecution", execution=execution)

    def delete_run(self, run_id: str) -> None:
        """Delete a run, as "Delete" does in the UI."""
        self._settle(_DELETE, "deleteRun", run_id=run_id)

    def force_terminate(self, run_id: str) -> None:
        """Mark a run as cancelled at once, as "Force termination immediately" does in the UI."""
        self._settle(_FORCE_TERMINATE, "terminateRun", run_id=run_id)

    def _settle(self, query: str, field_name: str, **variables: object) -> None:
        answer = self.ask(query, **variables)[field_name]
        if "message" in answer:
            msg = f"Dagster refused {field_name}: {answer['message']}"
            raise DagsterRebalanceError(msg)

    def wait_for_run(self, run_id: str, *, timeout_s: float) -> dg.DagsterRun:
        """Wait until a run has ended."""
        with self.instance() as instance:

            def ended() -> dg.DagsterRun | None:
                run = instance.get_run_by_id(run_id)
                return run if run is not None and run.is_finished else None

            return wait_until(ended, timeout_s=timeout_s, what=f"run {run_id} to end", interval_s=0.2)


def _selector(location: str, sensor: str) -> dict[str, str]:
    return {"repositoryLocationName": location, "repositoryName": "__repository__", "sensorName": sensor}


_START_SENSOR = """mutation($selector: SensorSelector!) {
  startSensor(sensorSelector: $selector) { __typename ... on PythonError { message } ... on SensorNotFoundError { message } }
}"""
_STOP_SENSOR = "mutation($id: String) { stopSensor(id: $id) { __typename ... on PythonError { message } } }"
_SENSOR = """query($selector: SensorSelector!, $limit: Int) {
  sensorOrError(sensorSelector: $selector) { ... on Sensor { sensorState {
    id status ticks(limit: $limit) { tickId status skipReason cursor runIds error { message causes { message } } timestamp }
  } } }
}"""
_PREVIEW = """mutation($selector: SensorSelector!, $cursor: String) {
  sensorDryRun(selectorData: $selector, cursor: $cursor) { __typename
    ... on PythonError { message } ... on SensorNotFoundError { message }
    ... on DryRunInstigationTick { evaluationResult { skipReason runRequests { runKey } error { message } } }
  }
}"""
_RE_EXECUTE = """mutation($run_id: String!) {
  launchRunReexecution(reexecutionParams: {parentRunId: $run_id, strategy: ALL_STEPS}) { __typename
    ... on Error { message }
  }
}"""
_RUN = """query($run_id: ID!) {
  runOrError(runId: $run_id) { ... on Run {
    jobName rootRunId runConfigYaml tags { key value } repositoryOrigin { repositoryLocationName repositoryName }
  } }
}"""
_RE_EXECUTE_STEPS = """mutation($execution: ExecutionParams!) {
  launchRunReexecution(executionParams: $execution) { __typename ... on Error { message } }
}"""
_DELETE = """mutation($run_id: String!) { deleteRun(runId: $run_id) { __typename ... on Error { message } } }"""
_FORCE_TERMINATE = """mutation($run_id: String!) {
  terminateRun(runId: $run_id, terminatePolicy: MARK_AS_CANCELED_IMMEDIATELY) { __typename ... on Error { message } }
}"""
_RELOAD = """mutation($location: String!) {
  reloadRepositoryLocation(repositoryLocationName: $location) { __typename
    ... on PythonError { message } ... on RepositoryLocationNotFound { message } ... on ReloadNotSupported { message }
  }
}"""
