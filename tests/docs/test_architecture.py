"""ARCHITECTURE.md agrees with the code."""

from __future__ import annotations

import re

from dagster_rebalance.core.partitions.state_machine import diagram
from tests.docs.blocks import ROOT, blocks

FILE = "ARCHITECTURE.md"


def test_state_diagram_is_the_table_of_transitions() -> None:
    assert blocks(FILE, "mermaid") == [diagram() + "\n"]


def test_codemap_is_the_tree_of_folders() -> None:
    tree = blocks(FILE, "text")[0]
    named, path = set(), [""]
    for line in tree.splitlines():
        found = re.match(r"( *)(\S+)", line)
        assert found is not None
        depth = len(found[1]) // 2
        path[depth:] = [found[2].rstrip("/")]
        named.add("/".join(path))
    folders = {
        str(init.parent.relative_to(ROOT))
        for top in ("dagster_rebalance", "proofs")
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert {name for name in named if not (ROOT / name).exists()} == set()
    assert {
        name
        for name in folders
        if name not in named and (name.startswith("dagster") or name.count("/") < 2)
    } == set()
