"""The help of the command line, which must not wait for large libraries."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

from dagster_rebalance.cli import declarations
from dagster_rebalance.cli.app import COMMANDS
from tests.cli.command_line import invoke

HEAVY = {"dagster", "confluent_kafka", "pyspark", "rich"}
HELP_OF_EACH = """
import json, sys
from dagster_rebalance.cli.app import main

loaded = {}
for command in sys.argv[1:]:
    sys.argv = ["dagster-rebalance", *command.split(), "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code
    loaded[command] = sorted(sys.modules)
json.dump(loaded, sys.stderr)
"""


def test_help_imports_no_heavy_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP_OF_EACH, "", *COMMANDS],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = json.loads(done.stderr)
    assert loaded.keys() == {"", *COMMANDS}
    assert [name for name, modules in loaded.items() if HEAVY.intersection(modules)] == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_command_passes_all_its_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = name.replace(" ", "_")
    declared = getattr(declarations, name)
    arguments = dict(inspect.signature(declared).parameters)
    passed: dict[str, object] = {}

    def recorded(module: str) -> SimpleNamespace:
        carried_out = getattr(import_module(module), name)

        def record(**given: object) -> None:
            inspect.signature(carried_out).bind(**given)
            passed.update(given)

        return SimpleNamespace(**{name: record})

    monkeypatch.setattr(declarations, "import_module", recorded)
    declared(**arguments)
    assert passed == arguments


@pytest.mark.parametrize("command", ["", *sorted(COMMANDS)])
def test_help_in_80_columns_is_not_cut_off(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke(*command.split(), "--help").output
    assert "..." not in re.sub(r"(\[ARGS\]|[\[{]?(partitions|keys|offsets)[\]}]?)\.\.\.", "", text)
