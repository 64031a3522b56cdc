"""docs/deploying.md: its code loads in either environment, and its files match the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import dagster as dg
import kubernetes_validate
import psycopg2
import pytest
import yaml

from dagster_rebalance import KafkaConsumerResource
from dagster_rebalance.orchestration.resources.kafka import BRANCH_VARIABLE
from dagster_rebalance.testing.fixtures import unique_name
from tests.docs.blocks import ROOT, block_with, run_block

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dagster_rebalance.testing.postgres import Postgres

PAGE = "docs/deploying.md"
VARIABLES = {
    "laptop": {"KAFKA_BROKERS": "localhost:9092", "SPARK_CONNECT_URL": ""},
    "production": {
        "ENVIRONMENT": "production",
        "KAFKA_BROKERS": "kafka:9092",
        "KAFKA_GROUP": "orders",
        "KAFKA_USERNAME": "orders",
        "KAFKA_PASSWORD": "secret",
        "SPARK_CONNECT_URL": "sc://spark.example.com:15002/;use_ssl=true",
    },
}
OPTIONAL = ("ENVIRONMENT", "KAFKA_GROUP", "KAFKA_USERNAME", "KAFKA_PASSWORD")
FILES = ROOT / "docs/deploying"
SYSTEMD = shutil.which("systemd-analyze")
NEEDED_S = KafkaConsumerResource.model_fields["shutdown_timeout_s"].default + 5


def _kubernetes() -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all((FILES / "kubernetes.yaml").read_text())


@pytest.mark.parametrize("version", ["1.28", "1.34"])
def test_manifests_are_accepted_by_kubernetes(version: str) -> None:
    for manifest in _kubernetes():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_pod_of_a_member_has_the_required_grace_period_and_rights() -> None:
    found = {manifest["kind"]: manifest for manifest in _kubernetes()}
    pod = found["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= NEEDED_S
    assert found["Deployment"]["spec"]["replicas"] == 1
    rolling = found["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": 1, "maxUnavailable": 0}
    account = found["ServiceAccount"]["metadata"]["name"]
    assert pod["serviceAccountName"] == account
    assert found["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    jobs = next(rule for rule in found["Role"]["rules"] if rule["resources"] == ["jobs"])
    assert {"get", "delete"} <= set(jobs["verbs"])
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"].items() <= labels.items()


def test_runs_get_the_secrets_of_the_code_server() -> None:
    (deployment,) = (one for one in _kubernetes() if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    secrets = [source["secretRef"]["name"] for source in container["envFrom"]]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    context = json.loads(variables["DAGSTER_CONTAINER_CONTEXT"])
    assert context == {"k8s": {"env_secrets": secrets}}


def test_compose_file_is_complete() -> None:
    compose = yaml.safe_load((FILES / "compose.yaml").read_text())
    services = compose["services"]
    for service in services.values():
        assert "image" in service
        assert service.get("depends_on", {}).keys() <= services.keys()
        volumes = {volume.partition(":")[0] for volume in service.get("volumes", ())}
        assert volumes <= compose["volumes"].keys()
    minutes = re.fullmatch(r"(\d+)m", services["code"]["stop_grace_period"])
    assert minutes is not None
    assert int(minutes[1]) * 60 >= NEEDED_S
    workspace = yaml.safe_load((FILES / "workspace.yaml").read_text())
    (server,) = (entry["grpc_server"] for entry in workspace["load_from"])
    assert server["host"] in services
    command = services["code"]["command"]
    assert str(server["port"]) in command
    assert server["location_name"] == command[command.index("--location-name") + 1]
    assert "password" not in (FILES / "compose.yaml").read_text().replace("PASSWORD", "")


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml", "shop-code.service"])
def test_code_server_command_is_accepted_by_dagster(name: str) -> None:
    (command,) = _commands(name)
    assert command[:3] == ["dagster", "api", "grpc"]
    said = subprocess.run(
        [sys.executable, "-m", "dagster", "api", "grpc", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for option in command[3:]:
        if option.startswith("--"):
            assert option in said.stdout, option


def test_webserver_and_daemon_get_the_workspace() -> None:
    services = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]
    for name in ("webserver", "daemon"):
        service = services[name]
        workspace = f"{service['environment']['DAGSTER_HOME']}/workspace.yaml"
        command = service["command"]
        assert command[command.index("-w") + 1] == workspace
    unit = (FILES / "shop-code.service").read_text()
    for program in ("dagster-daemon run", "dagster-webserver"):
        assert re.search(rf"^#   {program} -w /\S+/workspace\.yaml$", unit, re.MULTILINE)


def _commands(name: str) -> list[list[str]]:
    text = (FILES / name).read_text()
    if name.endswith(".service"):
        return [
            line.rpartition("/")[2].split()
            for line in re.findall("^ExecStart=(.*)$", text, re.MULTILINE)
        ]
    if name == "compose.yaml":
        return [yaml.safe_load(text)["services"]["code"]["command"]]
    deployments = [one for one in _kubernetes() if one["kind"] == "Deployment"]
    return [one["spec"]["template"]["spec"]["containers"][0]["args"] for one in deployments]


@pytest.mark.skipif(SYSTEMD is None, reason="needs systemd-analyze")
def test_unit_is_accepted_by_systemd(tmp_path: Path) -> None:
    text = (FILES / "shop-code.service").read_text()
    unit = tmp_path / "shop-code.service"
    unit.write_text(text.replace("/opt/shop/.venv/bin/dagster", "/bin/true"))
    found = subprocess.run(
        [str(SYSTEMD), "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_instance_settings_are_accepted_by_dagster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOST", "USERNAME", "PASSWORD", "DB"):
        monkeypatch.setenv(f"DAGSTER_PG_{name}", "nowhere")
    settings = yaml.safe_load((FILES / "dagster.yaml").read_text())
    postgres = settings.pop("storage")
    assert postgres["postgres"]["postgres_db"].keys() == {
        "hostname",
        "username",
        "password",
        "db_name",
        "port",
    }
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(settings))
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert type(instance.run_coordinator).__name__ == "QueuedRunCoordinator"


def _loaded(monkeypatch: pytest.MonkeyPatch, environment: str) -> tuple[dg.Definitions, Any]:
    """Return the definitions, and their resources as a run has them."""
    for name in OPTIONAL:
        monkeypatch.delenv(name, raising=False)
    for name, value in VARIABLES[environment].items():
        monkeypatch.setenv(name, value)
    names: dict[str, Any] = {"__name__": "pasted"}
    run_block(PAGE, (FILES / "definitions.py").read_text(), names)
    defs: dg.Definitions = names["defs"]
    dg.Definitions.validate_loadable(defs)
    keys = ("kafka", "spark")
    with dg.build_resources({key: (defs.resources or {})[key] for key in keys}) as resources:
        return defs, resources


def test_laptop_has_its_own_group_and_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    _, resources = _loaded(monkeypatch, "laptop")
    assert resources.spark.is_local
    assert resources.kafka.group_id == "orders-laptop"
    assert resources.kafka.security_protocol is None


def test_production_has_the_login_and_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    _, resources = _loaded(monkeypatch, "production")
    assert not resources.spark.is_local
    assert resources.kafka.group_id == "orders"
    assert resources.kafka.security_protocol == "SASL_SSL"


def test_variable_table_has_each_variable_of_the_code() -> None:
    text = (ROOT / PAGE).read_text()
    table = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    named = {name for variables in VARIABLES.values() for name in variables}
    assert all(f"`{name}`" in table for name in named | {"ORDERS_PATH"})


def test_deploying_page_names_each_file_and_the_guard_variable() -> None:
    text = (ROOT / PAGE).read_text()
    for file in FILES.iterdir():
        assert f"deploying/{file.name}" in text
    assert BRANCH_VARIABLE in text


@pytest.mark.postgres
def test_frozen_write_is_ended_by_postgres_for_other_writers_of_the_run(
    postgres: Postgres,
) -> None:
    name = unique_name("frozen").replace("-", "_")
    postgres.create_database(name)
    (setting,) = re.findall(r'-c "(ALTER .*)"', block_with(PAGE, "sh", "ALTER DATABASE"))
    setting = setting.replace("'30s'", "'100ms'").replace("DATABASE dagster", f"DATABASE {name}")
    address = postgres.url(name).replace("+psycopg2", "")
    with closing(psycopg2.connect(address)) as connection, connection, connection.cursor() as here:
        here.execute(setting)

    @dg.job
    def nothing() -> None:
        """Has no steps."""

    with (
        dg.instance_for_test(overrides=postgres.dagster_settings(name)) as instance,
        closing(psycopg2.connect(address)) as frozen,
    ):
        run = instance.create_run_for_job(nothing)
        frozen.cursor().execute("UPDATE runs SET status = status WHERE run_id = %s", [run.run_id])
        instance.add_run_tags(run.run_id, {"writer": "another process"})
        written = instance.get_run_by_id(run.run_id)
        assert written is not None
        assert written.tags["writer"] == "another process"
        with pytest.raises(psycopg2.Error, match=r"idle-in-transaction|closed"):
            frozen.cursor().execute("SELECT 1")
