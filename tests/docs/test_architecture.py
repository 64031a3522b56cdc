"""ARCHITECTURE.md says what the code says."""

from __future__ import annotations

import re

import pytest

from dagster_rebalance.core.partitions.state_machine import diagram
from tests.docs.blocks import ROOT, blocks

FILE = "ARCHITECTURE.md"
LAYERS = ("core", "consumer", "spark", "orchestration", "components")


def test_the_diagram_is_the_table_of_transitions() -> None:
    """A diagram that is drawn by hand is wrong after the first change."""
    assert blocks(FILE, "mermaid") == [diagram() + "\n"]


@pytest.mark.parametrize("layer", LAYERS)
def test_the_codemap_names_each_module(layer: str) -> None:
    """Who looks for a module finds it; who removes one finds this."""
    codemap = (ROOT / FILE).read_text().split("## Codemap")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", codemap))
    modules = {path.stem for path in (ROOT / "dagster_rebalance" / layer).glob("*.py")} - {
        "__init__"
    }
    assert modules <= named, modules - named


def test_the_codemap_names_no_module_that_does_not_exist() -> None:
    """A map with places that are gone is worse than none."""
    codemap = (ROOT / FILE).read_text().split("## Codemap")[1].split("\n## ")[0]
    modules = {
        name
        for folder in ("dagster_rebalance", "proofs")
        for path in (ROOT / folder).rglob("*.py")
        for name in (path.stem, path.parent.name)
    }
    named = set(re.findall(r"`([a-z_]+)`", codemap))
    assert named <= modules, named - modules
