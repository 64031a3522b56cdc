"""The site has every page, and the reference every public name."""

from __future__ import annotations

import re

import dagster_rebalance
from tests.docs.blocks import ROOT

REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))


def test_reference_has_each_public_name_once() -> None:
    shown = [
        name
        for page in REFERENCE
        for name in re.findall(r"^::: dagster_rebalance\.(\w+)$", page.read_text(), re.MULTILINE)
    ]
    assert sorted(shown) == sorted(set(dagster_rebalance.__all__) - {"__version__"})


def test_navigation_has_each_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r"[\w./-]+\.md", navigation))
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert pages | {path.name for path in ROOT.glob("*.md")} == listed
