"""The component with the real command `dg`, in a project."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import dagster
import pytest
from confluent_kafka import Producer

from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.deployment import CodeLocation, DagsterDeployment
from tests.components.project import TYPE

if TYPE_CHECKING:
    from dagster_rebalance.testing.broker import KafkaCluster

RECORDS = 10
BATCHES, STREAM = "component_batches", "component_stream"
DG = Path(sys.executable).with_name("dg")
PYPROJECT = """\
[project]
name = "shop"
version = "0.1.0"

[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "shop"
"""
DEFINITIONS = """\
from pathlib import Path

import dagster as dg


@dg.definitions
def defs() -> dg.Definitions:
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with both forms of the component."""
    root = tmp_path_factory.mktemp("shop")
    make_project(root)
    scaffold(root, BATCHES)
    scaffold(root, STREAM, "--streaming", "true")
    return root


@pytest.fixture(scope="module")
def wrong_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with one component: `dg check yaml` checks one file per type."""
    root = tmp_path_factory.mktemp("wrong")
    make_project(root)
    scaffold(root, BATCHES)
    return root


def make_project(root: Path) -> None:
    """Create a project as `create-dagster` does."""
    (root / "pyproject.toml").write_text(PYPROJECT)
    package = root / "src" / "shop"
    (package / "defs").mkdir(parents=True)
    for folder in (package, package / "defs"):
        (folder / "__init__.py").touch()
    (package / "definitions.py").write_text(DEFINITIONS)


def scaffold(root: Path, name: str, *options: str) -> None:
    """Scaffold a component."""
    done = dg(root, "scaffold", "defs", TYPE, name, *options)
    assert done.returncode == 0, done.stdout


def dg(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [DG, *arguments],
        cwd=project,
        env={
            **os.environ,
            "PYTHONPATH": str(project / "src"),
            "VIRTUAL_ENV": str(DG.parent.parent),
            "KAFKA_PASSWORD": "swordfish",
            "DAGSTER_DG_UPDATE_CHECK_ENABLED": "0",
            "DAGSTER_DISABLE_TELEMETRY": "1",
            "PYTHONWARNINGS": "ignore",  # of Dagster, about its own previews
            "NO_COLOR": "1",
            "COLUMNS": "200",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )


def test_dg_lists_the_component_with_a_summary(project: Path) -> None:
    listed = json.loads(dg(project, "list", "components", "--json").stdout)["items"]
    (summary,) = [entry["summary"] for entry in listed if entry["key"] == TYPE]
    assert "Processes Kafka topics" in summary


def test_scaffolded_components_pass_dg_check(project: Path) -> None:
    for what in ("yaml", "defs"):
        checked = dg(project, "check", what)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("wrong", "place", "message"),
    [
        ("on_lost: explode", "attributes.kafka.on_lost", "'explode' is not valid"),
        ("boostrap_servers: x", "attributes.kafka.boostrap_servers", "was unexpected"),
        ("on_lost: '{{ env.HOME }}'", "attributes.kafka.on_lost", "should be 'leave' or 'cancel'"),
    ],
)
def test_dg_check_shows_a_wrong_value_with_its_line_and_no_secret(
    wrong_project: Path, wrong: str, place: str, message: str
) -> None:
    file = wrong_project / "src" / "shop" / "defs" / BATCHES / "defs.yaml"
    right = file.read_text()
    lines = right.replace("# max_records_per_range: 100000", wrong).replace("    # s", "    s")
    file.write_text(lines)
    try:
        checked = dg(wrong_project, "check", "defs")
    finally:
        file.write_text(right)
    assert checked.returncode == 1
    number = lines.splitlines().index(f"    {wrong}") + 1
    error = re.sub(r"\s+", " ", checked.stdout)
    assert f"{BATCHES}/defs.yaml:{number} - " in error
    assert place in error
    assert message in error
    assert "swordfish" not in error


@pytest.mark.e2e
@pytest.mark.broker
def test_scaffolded_components_process_records(
    project: Path, kafka_broker: KafkaCluster, tmp_path: Path
) -> None:
    for topic in (BATCHES, STREAM):
        kafka_broker.create_topic(topic, 1)
        producer = Producer(kafka_broker.client_config())
        for number in range(RECORDS):
            producer.produce(topic, str(number))
        producer.flush(120)
    location = CodeLocation(
        "shop",
        "shop.definitions",
        project / "src",
        {"KAFKA_BROKERS": kafka_broker.bootstrap_servers},
    )
    with (
        DagsterDeployment(tmp_path / "home", [location]) as deployment,
        deployment.instance() as instance,
    ):
        for folder in (BATCHES, STREAM):
            deployment.ui.start_sensor("shop", f"{folder}_batches_sensor")
        wait_until(
            lambda: committed(instance) == {BATCHES: RECORDS, STREAM: RECORDS} or None,
            timeout_s=240,
            what=lambda: (
                f"both groups to commit; {committed(instance)}, "
                f"{deployment.ui.ticks('shop', f'{BATCHES}_batches_sensor', 1)}"
            ),
        )
        for asset in (BATCHES, STREAM):
            assert instance.get_latest_materialization_event(dagster.AssetKey(asset))


def committed(instance: dagster.DagsterInstance) -> dict[str, object]:
    """Return the last committed offset of each group in Dagster."""
    found: dict[str, object] = {}
    for group in (BATCHES, STREAM):
        event = instance.get_latest_materialization_event(GroupAssets.of(group).offsets)
        if event is not None and event.asset_materialization is not None:
            found[group] = event.asset_materialization.metadata["until"].value
    return found
