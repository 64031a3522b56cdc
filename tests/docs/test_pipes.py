"""docs/pipes.md: the job reads its batch on each platform, and jobs of a dead run are ended.

The platforms are simulated: Pipes clients start local processes, EMR is botocore's stub, and the
others follow the documentation of their SDKs (databricks-sdk 0.162, kubernetes 37).
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from botocore.stub import Stubber
from confluent_kafka import Producer
from pyarrow import dataset

from dagster_rebalance import ExternalJobs, KafkaBatch, OffsetRange
from tests.docs.blocks import ROOT, block_with, run_block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.spark_connect import SparkConnectServer

PAGE = "docs/pipes.md"
FILES = {
    "class DatabricksRuns": "docs/pipes/databricks.py",
    "class EmrJobs": "docs/pipes/emr.py",
    "class Pods": "docs/pipes/kubernetes.py",
    "PipesSubprocessClient": "docs/pipes/local.py",
}
RUN = "7d9f1c1e-0000-4000-8000-000000000001"
OTHER = "7d9f1c1e-0000-4000-8000-000000000002"
SHIELD = """
import sys
for name in ("dagster", "confluent_kafka", "pydantic", "dagster_pyspark"):
    sys.modules[name] = None
"""
"""Blocks imports of packages that the other side must not need."""


class Client(dg.PipesSubprocessClient):
    """Starts a process on any platform, and records its arguments."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()
        self.told: dict[str, Any] = {}

    def run(  # type: ignore[override]
        self,
        *,
        context: dg.AssetExecutionContext,
        extras: dict[str, Any],
        **told: Any,  # noqa: ANN401 - each platform has others
    ) -> Any:  # noqa: ANN401 - Dagster exports no name for it
        """Start the script of the page, which is in this folder."""
        self.told = told
        command = [sys.executable, "orders_job.py"]
        return super().run(context=context, extras=extras, command=command)


class Databricks:
    """The runs of a workspace, of which a cancelled one is listed once more."""

    def __init__(self) -> None:
        self.jobs = self
        names = {1: f"orders {RUN}", 2: f"orders {OTHER}", 3: None}
        self.runs = {
            number: SimpleNamespace(run_id=number, run_name=n) for number, n in names.items()
        }
        self.cancelled: list[int] = []

    def list_runs(self, *, active_only: bool) -> Iterator[SimpleNamespace]:
        """A page after the other."""
        assert active_only
        for number in [run for run in self.cancelled if self.cancelled.count(run) == 2]:
            self.runs.pop(number, None)
        return iter(list(self.runs.values()))

    def cancel_run(self, run_id: int) -> None:
        """Return at once."""
        self.cancelled.append(run_id)


class Pods:
    """The pods of a namespace, by their labels; a deleted one is listed once more."""

    def __init__(self) -> None:
        names = {"one": RUN, "two": OTHER}
        self.pods = {f"kafka-batch-of={of}": name for name, of in names.items()}
        self.deleted: list[str] = []

    def list_namespaced_pod(self, namespace: str, *, label_selector: str) -> SimpleNamespace:
        """Those with a label."""
        assert namespace == "jobs"
        name = self.pods.get(label_selector)
        is_there = name is not None and self.deleted.count(name) < 2
        pod = SimpleNamespace(metadata=SimpleNamespace(name=name))
        return SimpleNamespace(items=[pod] if is_there else [])

    def delete_namespaced_pod(self, name: str, namespace: str) -> None:
        """Return at once, as the API does while its grace period runs."""
        assert namespace == "jobs"
        self.deleted.append(name)


class SubmitTask:
    """The task of a Databricks run."""

    @staticmethod
    def from_dict(task: dict[str, Any]) -> dict[str, Any]:
        """As the SDK builds it."""
        return task


@dataclass
class Played:
    """A fake of the platforms."""

    workspace: Databricks
    pods: Pods


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """The packages of the platforms, as far as the page uses them."""
    found = Played(Databricks(), Pods())
    modules: Mapping[str, Mapping[str, object]] = {
        "dagster_aws": {},
        "dagster_aws.pipes": {"PipesEMRServerlessClient": Client},
        "dagster_databricks": {"PipesDatabricksClient": Client},
        "dagster_k8s": {"PipesK8sClient": Client},
        "databricks": {},
        "databricks.sdk": {"WorkspaceClient": lambda: found.workspace},
        "databricks.sdk.service": {},
        "databricks.sdk.service.jobs": {"BaseRun": object, "SubmitTask": SubmitTask},
        "kubernetes": {
            "client": SimpleNamespace(CoreV1Api=lambda: found.pods, V1Pod=object),
            "config": SimpleNamespace(load_incluster_config=lambda: None),
        },
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("KAFKA_BROKERS", "nowhere:9092")
    return found


def pasted(text: str) -> dict[str, Any]:
    """The names of a file beside the page, as a user pastes it."""
    found: dict[str, Any] = {"__name__": "pasted"}
    run_block(FILES[text], (ROOT / FILES[text]).read_text(), found)
    return found


def stopping(name: str, names: dict[str, Any]) -> ExternalJobs:
    """Return an object that ends jobs without pauses between polls."""
    jobs: ExternalJobs = names[name]()
    jobs.look_s = 0.0
    return jobs


def named(told: dict[str, Any]) -> str:
    """Return the job name for Databricks."""
    return str(told["submit_args"]["run_name"])


def started(told: dict[str, Any]) -> str:
    """Return the job name for EMR."""
    return str(told["start_job_run_params"]["name"])


def labelled(told: dict[str, Any]) -> str:
    """Return the label of the pod."""
    return str(told["base_pod_meta"]["labels"]["kafka-batch-of"])


PLATFORMS = {
    "class DatabricksRuns": named,
    "class EmrJobs": started,
    "class Pods": labelled,
}


@pytest.mark.parametrize("text", PLATFORMS)
@pytest.mark.usefixtures("played")
def test_pipes_example_loads(text: str) -> None:
    dg.Definitions.validate_loadable(pasted(text)["defs"])


def test_databricks_runs_are_ended(played: Played) -> None:
    stopping("DatabricksRuns", pasted("class DatabricksRuns")).stop(RUN)
    assert played.workspace.cancelled == [1, 1]


def test_kubernetes_pods_are_ended(played: Played) -> None:
    stopping("Pods", pasted("class Pods")).stop(RUN)
    assert played.pods.deleted == ["one", "one"]


@pytest.mark.usefixtures("played")
def test_emr_jobs_are_ended() -> None:
    names = pasted("class EmrJobs")
    emr, application = names["emr"], names["APPLICATION"]
    known = emr.meta.service_model.shape_for("JobRunState").enum
    assert set(known) - set(names["ACTIVE"]) == {"SUCCESS", "FAILED", "CANCELLED"}
    asked = {"applicationId": application, "states": names["ACTIVE"]}

    def job(number: int, of: str, state: str) -> dict[str, Any]:
        return {
            "applicationId": application,
            "id": f"job-{number}",
            "arn": f"arn:aws:emr-serverless:eu-central-1:123456789012:/job/{number:060}",
            "createdBy": names["ROLE"],
            "createdAt": 0,
            "updatedAt": 0,
            "executionRole": names["ROLE"],
            "state": state,
            "stateDetails": "as the test wants it",
            "releaseLabel": "emr-spark-8.0.0",
            "name": f"orders {of}",
        }

    with Stubber(emr) as stub:
        other = job(1, OTHER, "RUNNING")
        stub.add_response("list_job_runs", {"jobRuns": [other], "nextToken": "more"}, asked)
        more = {**asked, "nextToken": "more"}
        stub.add_response("list_job_runs", {"jobRuns": [job(2, RUN, "RUNNING")]}, more)
        cancelled = {"applicationId": application, "jobRunId": "job-2"}
        stub.add_response("cancel_job_run", cancelled, cancelled)
        ending = {"jobRuns": [other, job(2, RUN, "CANCELLING")]}
        stub.add_response("list_job_runs", ending, asked)
        stub.add_response("list_job_runs", {"jobRuns": [other]}, asked)
        stopping("EmrJobs", names).stop(RUN)
        stub.assert_no_pending_responses()


@pytest.fixture(scope="module")
def topic(kafka_broker: KafkaCluster) -> str:
    """A topic with ten records."""
    kafka_broker.create_topic("piped", 1)
    producer = Producer(kafka_broker.client_config())
    for number in range(10):
        producer.produce("piped", str(number).encode(), partition=0)
    producer.flush(120)
    return "piped"


@pytest.fixture
def other_side(
    kafka_broker: KafkaCluster,
    spark_connect_server: SparkConnectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Create a folder with the script, without Dagster and Kafka clients.

    Returns its output folder.
    """
    output = tmp_path / "lake" / "orders"
    output.parent.mkdir()
    script = block_with(PAGE, "python", "PipesBatch.from_extras").replace(
        "s3://lake/orders", str(output)
    )
    (tmp_path / "orders_job.py").write_text(script)
    (tmp_path / "shield").mkdir()
    (tmp_path / "shield" / "sitecustomize.py").write_text(SHIELD)
    monkeypatch.chdir(tmp_path)
    programs = os.path.dirname(sys.executable)  # noqa: PTH120 - it may be a link
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'shield'}:{ROOT}")
    monkeypatch.setenv("SPARK_REMOTE", spark_connect_server.remote)  # pyspark in the job reads it
    monkeypatch.setenv("KAFKA_SETTINGS", json.dumps(kafka_broker.client_config()))
    return output


@pytest.mark.spark
@pytest.mark.broker
@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(
    ("text", "named_by"), [*PLATFORMS.items(), ("PipesSubprocessClient", None)]
)
def test_spark_job_writes_exactly_its_batch(
    text: str,
    named_by: Callable[[dict[str, Any]], str] | None,
    topic: str,
    other_side: Path,
) -> None:
    names = pasted(text)
    client = Client() if named_by else dg.PipesSubprocessClient()
    batch = KafkaBatch.for_testing([OffsetRange(topic, 0, 2, 7)])
    result = dg.materialize([names["orders"]], resources={"kafka_batch": batch, "pipes": client})
    table = dataset.dataset(other_side, format="parquet").to_table()
    assert sorted(table["value"].to_pylist()) == [str(number).encode() for number in range(2, 7)]
    (made,) = result.asset_materializations_for_node("orders")
    assert made.metadata["dagster/row_count"].value == 5
    assert made.metadata["batch"].value == "test"
    if named_by and isinstance(client, Client):
        assert named_by(client.told).endswith(result.run_id), "its job can be found by the run"
