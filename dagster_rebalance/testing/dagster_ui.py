"""The actions of Dagster's UI, through the GraphQL API of a webserver."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import DagsterRebalanceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import dagster as dg


class DagsterUi:
    """The UI of a deployment. Each method raises `DagsterRebalanceError` if Dagster refuses.

    Args:
        url: Address of the webserver.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, query: str, **variables: object) -> dict[str, Any]:
        """Execute a GraphQL query and return its data.

        Raises:
            DagsterRebalanceError: The webserver refused the query, could not be reached, or could
                not reach its storage.
        """
        body = json.dumps({"query": query, "variables": variables}).encode()
        address, headers = f"{self.url}/graphql", {"Content-Type": "application/json"}
        request = urllib.request.Request(address, body, headers)  # noqa: S310 - our own server
        try:
            with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
                answer = json.load(response)
        except OSError as problem:
            msg = f"Dagster's webserver gave no answer: {problem}"
            raise DagsterRebalanceError(msg) from problem
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
        state = self.ask(_SENSOR, selector=_selector(location, sensor))["sensorOrError"][
            "sensorState"
        ]
        self._settle(_STOP_SENSOR, "stopSensor", id=state["id"])

    def ticks(self, location: str, sensor: str, limit: int = 20) -> list[dict[str, Any]]:
        """Return the last ticks of a sensor, newest first."""
        answer = self.ask(_SENSOR, selector=_selector(location, sensor), limit=limit)
        ticks: list[dict[str, Any]] = answer["sensorOrError"]["sensorState"]["ticks"]
        return ticks

    def preview(self, location: str, sensor: str) -> dict[str, Any]:
        """Evaluate a sensor without effects ("Preview tick result")."""
        answer = self.ask(_PREVIEW, selector=_selector(location, sensor), cursor=None)
        result: dict[str, Any] = answer["sensorDryRun"]["evaluationResult"]
        return result

    def reload(self, location: str) -> None:
        """Reload the code of a location ("Reload definitions")."""
        self._settle(_RELOAD, "reloadRepositoryLocation", location=location)

    def broken_locations(self) -> list[str]:
        """Return the code locations that failed to load."""
        entries = self.ask(_LOCATIONS)["workspaceOrError"].get("locationEntries", ())
        return [
            entry["name"]
            for entry in entries
            if (entry["locationOrLoadError"] or {}).get("__typename") == "PythonError"
        ]

    def launch(self, location: str, job: str, config: Mapping[str, object] | None = None) -> str:
        """Launch a job with a config ("Launch run"), and return the id of its run."""
        execution = {
            "selector": {**_repository(location), "jobName": job},
            "runConfigData": json.dumps(config or {}),
            "mode": "default",
        }
        answer = self._settle(_LAUNCH, "launchRun", execution=execution)
        return str(answer["run"]["runId"])

    def re_execute(
        self, run_id: str, steps: Sequence[str] = (), tags: Mapping[str, str] | None = None
    ) -> str:
        """Re-execute a run or some of its steps ("Re-execute all"), and return the new run's id.

        `tags` are added to the new run.
        """
        if not steps and not tags:
            answer = self._settle(_RE_EXECUTE, "launchRunReexecution", run_id=run_id)
            return str(answer["run"]["runId"])
        run = self.ask(_RUN, run_id=run_id)["runOrError"]
        location = run["repositoryOrigin"]["repositoryLocationName"]
        copied = {
            tag["key"]: tag["value"]
            for tag in run["tags"]
            if not tag["key"].startswith(("dagster/", ".dagster/"))
        }
        execution = {
            "selector": {**_repository(location), "jobName": run["jobName"]},
            "runConfigData": run["runConfigYaml"],
            "mode": "default",
            "stepKeys": list(steps) or None,
            "executionMetadata": {
                "parentRunId": run_id,
                "rootRunId": run["rootRunId"] or run_id,
                "tags": [
                    {"key": key, "value": value}
                    for key, value in {**copied, **(tags or {})}.items()
                ],
            },
        }
        answer = self._settle(_RE_EXECUTE_STEPS, "launchRunReexecution", execution=execution)
        return str(answer["run"]["runId"])

    def delete_run(self, run_id: str) -> None:
        """Delete a run ("Delete")."""
        self._settle(_DELETE, "deleteRun", run_id=run_id)

    def force_terminate(self, run_id: str) -> None:
        """Mark a run as cancelled at once ("Force termination immediately")."""
        self._settle(_FORCE_TERMINATE, "terminateRun", run_id=run_id)

    def cancel(self, run_id: str) -> None:
        """Cancel a run ("Terminate"): a started run is asked to end; a queued run never starts."""
        self._settle(_CANCEL, "terminateRun", run_id=run_id)

    def wipe(self, *assets: dg.AssetKey) -> None:
        """Delete the materialization records of assets ("Wipe materializations")."""
        self._settle(
            _WIPE,
            "wipeAssets",
            ranges=[{"assetKey": {"path": list(asset.path)}} for asset in assets],
        )

    def report(self, asset: dg.AssetKey, *partitions: str) -> None:
        """Report a materialization ("Report materialization")."""
        params = {
            "eventType": "ASSET_MATERIALIZATION",
            "assetKey": {"path": list(asset.path)},
            "partitionKeys": list(partitions),
        }
        self._settle(_REPORT, "reportRunlessAssetEvents", params=params)

    def delete_partitions(self, location: str, definition: str, *keys: str) -> None:
        """Delete dynamic partitions ("Delete" on the page of an asset)."""
        self._settle(
            _DELETE_PARTITIONS,
            "deleteDynamicPartitions",
            repository=_repository(location),
            definition=definition,
            keys=list(keys),
        )

    def _settle(self, query: str, field_name: str, **variables: object) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask(query, **variables)[field_name]
        problems = [one["message"] for one in answer.get("errors", [answer]) if "message" in one]
        if problems:
            msg = f"Dagster refused {field_name}: {'; '.join(problems)}"
            raise DagsterRebalanceError(msg)
        return answer


def _selector(location: str, sensor: str) -> dict[str, str]:
    return {**_repository(location), "sensorName": sensor}


def _repository(location: str) -> dict[str, str]:
    """Return the selector of the repository of a location with one `Definitions`."""
    return {"repositoryLocationName": location, "repositoryName": "__repository__"}


_START_SENSOR = """mutation($selector: SensorSelector!) {
  startSensor(sensorSelector: $selector) { __typename \
... on PythonError { message } ... on SensorNotFoundError { message } }
}"""
_STOP_SENSOR = (
    "mutation($id: String) { stopSensor(id: $id) { __typename ... on PythonError { message } } }"
)
_SENSOR = """query($selector: SensorSelector!, $limit: Int) {
  sensorOrError(sensorSelector: $selector) { ... on Sensor { sensorState {
    id status ticks(limit: $limit) { tickId status skipReason cursor runIds \
error { message causes { message } } timestamp endTimestamp }
  } } }
}"""
_PREVIEW = """mutation($selector: SensorSelector!, $cursor: String) {
  sensorDryRun(selectorData: $selector, cursor: $cursor) { __typename
    ... on PythonError { message } ... on SensorNotFoundError { message }
    ... on DryRunInstigationTick { evaluationResult { skipReason \
runRequests { runKey } error { message } } }
  }
}"""
_LAUNCH = """mutation($execution: ExecutionParams!) {
  launchRun(executionParams: $execution) { __typename \
... on Error { message } ... on RunConfigValidationInvalid { errors { message } } \
... on LaunchRunSuccess { run { runId } } }
}"""
_RE_EXECUTE = """mutation($run_id: String!) {
  launchRunReexecution(reexecutionParams: {parentRunId: $run_id, strategy: ALL_STEPS}) { __typename
    ... on Error { message } ... on LaunchRunSuccess { run { runId } }
  }
}"""
_RUN = """query($run_id: ID!) {
  runOrError(runId: $run_id) { ... on Run {
    jobName rootRunId runConfigYaml tags { key value } repositoryOrigin { repositoryLocationName }
  } }
}"""
_RE_EXECUTE_STEPS = _LAUNCH.replace("launchRun(", "launchRunReexecution(")
_CANCEL = """mutation($run_id: String!) {
  terminateRun(runId: $run_id, terminatePolicy: SAFE_TERMINATE) { __typename
    ... on Error { message } ... on TerminateRunFailure { message }
  }
}"""
_WIPE = """mutation($ranges: [PartitionsByAssetSelector!]!) {
  wipeAssets(assetPartitionRanges: $ranges) { __typename ... on Error { message } }
}"""
_REPORT = """mutation($params: ReportRunlessAssetEventsParams!) {
  reportRunlessAssetEvents(eventParams: $params) { __typename ... on Error { message } }
}"""
_DELETE = (
    "mutation($run_id: String!) { deleteRun(runId: $run_id) { __typename ... on Error "
    "{ message } } }"
)
_FORCE_TERMINATE = """mutation($run_id: String!) {
  terminateRun(runId: $run_id, terminatePolicy: MARK_AS_CANCELED_IMMEDIATELY) { __typename
    ... on Error { message } ... on TerminateRunFailure { message }
  }
}"""
_DELETE_PARTITIONS = """mutation($repository: RepositorySelector!, $definition: String!, \
$keys: [String!]!) {
  deleteDynamicPartitions(repositorySelector: $repository, \
partitionsDefName: $definition, partitionKeys: $keys) {
    __typename ... on PythonError { message } ... on UnauthorizedError { message }
  }
}"""
_LOCATIONS = """query {
  workspaceOrError {
    ... on Workspace { locationEntries { name locationOrLoadError { __typename } } }
  }
}"""
_RELOAD = """mutation($location: String!) {
  reloadRepositoryLocation(repositoryLocationName: $location) { __typename
    ... on PythonError { message } ... on RepositoryLocationNotFound { message } \
... on ReloadNotSupported { message }
  }
}"""
