"""docs/kafka-proposals.md names tests that exist, and the public names that it speaks of."""

from __future__ import annotations

import re

import dagster_rebalance
from dagster_rebalance import RebalanceAwareConsumer
from tests.docs.blocks import ROOT

TABLE = (ROOT / "docs" / "kafka-proposals.md").read_text()
CASES = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)


def test_each_test_that_is_named_exists() -> None:
    existing = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in CASES.findall(path.read_text())
    }
    named = set(re.findall(r"`(test_\w+)`", TABLE))
    assert len(named) > 50
    assert named <= existing, named - existing


def test_each_line_names_what_shows_it() -> None:
    rows = [
        line
        for line in TABLE.splitlines()
        if line.startswith("|") and not re.match(r"\|(-|.* shown by)", line)
    ]
    assert len(rows) > 50
    for row in rows:
        assert re.search(
            r"`test_\w+`|tests/|state machine|all of its tests", row.split(" | ")[-1]
        ), row


def test_the_names_of_the_surface_exist() -> None:
    for name in re.findall(r"`([A-Z]\w+)`", TABLE):
        assert hasattr(dagster_rebalance, name) or name in {"RevokeLists", "DeprecationWarning"}, (
            name
        )
    for name in (
        "poll_with_rebalance",
        "get_to_be_revoked_partitions",
        "get_lost_partitions",
        "delay_revoke",
        "pause_pattern",
        "pause_all",
    ):
        assert f"`{name}" in TABLE
        assert hasattr(RebalanceAwareConsumer, name)
