"""The wheel in empty environments: each extra works without the others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import dagster_rebalance
from dagster_rebalance.cli.app import COMMANDS
from tests.docs.blocks import ROOT
from tests.package.environments import environment, find_python, install, install_extra, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.package
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
CORE_TOOLS = ("pytest", "pytest-timeout", "hypothesis")
MODULES = {
    "cli": tuple(
        f"dagster_rebalance.cli.{name}"
        for name in ("letters", "operator_commands", "produce", "prune", "reset", "status")
    ),
    "msk": ("dagster_rebalance.kafka.client.msk_iam", "aws_msk_iam_sasl_signer"),
    "registry": (
        "dagster_rebalance.orchestration.resources.registry",
        "confluent_kafka.schema_registry",
        "fastavro",
        "google.protobuf",
        "jsonschema_rs",
        "jsonschema_specifications",
        "referencing",
    ),
    "spark": (
        "dagster_rebalance.spark.output",
        "dagster_rebalance.spark.ranges",
        "dagster_pyspark",
    ),
    "testing": (
        "dagster_rebalance.cli.local_broker",
        "dagster_rebalance.testing.fixtures",
        "dagster_rebalance.testing.fake_group",
        "dagster_rebalance.testing.deployment",
        "dagster_rebalance.testing.postgres",
        "dagster_rebalance.testing.proxy",
    ),
}
"""Modules of the documentation and of the commands, by extra."""

HELP = """
import sys
from dagster_rebalance.cli.app import main

for command in sys.argv[1:]:
    sys.argv = ["dagster-rebalance", *command.split(), "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code
"""
"""Prints the help of each command, in one process."""


@pytest.mark.parametrize("version", PYTHONS)
def test_wheel_has_every_public_name_and_passes_the_core_tests(
    version: str, wheel: Path, tmp_path: Path
) -> None:
    """Runs on each installed Python, without the property tests.

    The tests are copied: next to the checkout they would import it.
    """
    python = find_python(version)
    if not python:
        pytest.skip(f"no Python {version} on this machine")
    programs = environment(tmp_path / "environment", python)
    install(programs, wheel, *CORE_TOOLS)
    names = ", ".join(dagster_rebalance.__all__)
    home = "import dagster_rebalance; print(dagster_rebalance.__file__)"
    code = f"from dagster_rebalance import {names}; {home}"
    assert str(programs.parent) in run(programs / "python", "-c", code, cwd=tmp_path)
    shutil.copytree(ROOT / "tests" / "core", tmp_path / "tests" / "core")
    shutil.copy(ROOT / "tests" / "story.py", tmp_path / "tests")
    shutil.copy(ROOT / "tests" / "__init__.py", tmp_path / "tests")
    options = ("--import-mode=importlib", "-o", "pythonpath=.", "-m", "not hypothesis")
    pytest_ = (programs / "python", "-m", "pytest", "-q", "--timeout=240")
    assert " passed" in run(*pytest_, *options, "tests/core", cwd=tmp_path)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of one environment for all extras.

    `install_extra` removes what another extra has installed. A new environment for each would
    compile Dagster again.
    """
    return environment(tmp_path_factory.mktemp("extras") / "environment", sys.executable)


@pytest.mark.parametrize("extra", [*MODULES, "cli"])
def test_extra_works_without_the_others(
    extra: str, programs: Path, wheel: Path, tmp_path: Path
) -> None:
    install_extra(programs, wheel, extra)
    for module in MODULES.get(extra, ()):  # each in a fresh process: none relies on another import
        run(programs / "python", "-c", f"import {module}", cwd=tmp_path)
    commands = {"cli": COMMANDS.keys() - {"broker"}, "testing": {"broker"}}.get(extra, set())
    shown = run(programs / "python", "-c", HELP, *commands, cwd=tmp_path) if commands else ""
    for command in commands:
        assert f"Usage: dagster-rebalance {command} " in shown


def test_command_without_its_extra_names_the_extra(
    programs: Path, wheel: Path, tmp_path: Path
) -> None:
    install_extra(programs, wheel, "")
    done = subprocess.run(
        [programs / "dagster-rebalance"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "dagster-rebalance[cli]" in done.stderr
