"""The package as a whole: lazy imports, layers, and the lock."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dagster_rebalance

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dagster_rebalance"
CORE = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (PACKAGE / "core").rglob("*.py")
    if path.stem != "__init__"
)
HEAVY = ("dagster", "confluent_kafka", "pyspark")


def modules_loaded_by(statement: str) -> set[str]:
    """The names of all modules that a fresh interpreter has loaded after a statement."""
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def imports_of(path: Path) -> Iterator[str]:
    """The absolute names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def run_time_imports_of(path: Path) -> Iterator[str]:
    """The same without those under `if TYPE_CHECKING`, which only type checkers read."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize(
    "statement", ["import dagster_rebalance", f"import {', '.join(CORE)}"], ids=["package", "core"]
)
def test_importing_the_package_or_its_core_loads_no_heavy_library(statement: str) -> None:
    """A run process and a test of the core must not pay for Dagster, a Kafka client or Spark."""
    assert modules_loaded_by(statement).isdisjoint(HEAVY)


def test_the_check_for_heavy_libraries_can_fail() -> None:
    """The check above would be worth nothing if it could not see them."""
    assert "confluent_kafka" in modules_loaded_by("import confluent_kafka")


def test_the_core_imports_only_the_standard_library() -> None:
    """A list of forbidden libraries could not be complete."""
    allowed = sys.stdlib_module_names | {"dagster_rebalance"}
    foreign = {
        (path.name, name)
        for path in (PACKAGE / "core").rglob("*.py")
        for name in run_time_imports_of(path)
        if name.split(".")[0] not in allowed
    }
    assert foreign == set()


def test_nothing_imports_private_modules_of_dagster() -> None:
    """Dagster changes private modules without notice."""
    private = {
        (path.name, name)
        for path in PACKAGE.rglob("*.py")
        for name in imports_of(path)
        if re.match(r"dagster\w*\._", name)
    }
    assert private == set()


@pytest.mark.parametrize("name", dagster_rebalance.__all__)
def test_every_public_name_loads(name: str) -> None:
    """Loading is lazy, so a typo would show only in use."""
    assert getattr(dagster_rebalance, name) is not None
    assert name in dir(dagster_rebalance)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """`hasattr` and `from ... import` rely on it."""
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dagster_rebalance.no_such_name


def test_dg_finds_the_package() -> None:
    """`dg list components` looks for this entry point."""
    assert "dagster_rebalance" in {
        point.value for point in entry_points(group="dagster_dg_cli.registry_modules")
    }


def test_the_lock_has_a_hash_for_each_package_and_names_no_address() -> None:
    locks = list((ROOT / "requirements").glob("*.txt"))
    assert len(locks) == 2
    for lock in locks:
        text = lock.read_text()
        entries = re.split(
            r"\n(?=[a-z0-9])", re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE).strip()
        )
        assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)
        assert "://" not in text
