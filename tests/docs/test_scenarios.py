"""`scenarios.yaml` and `proposals.yaml`: each line names existing tests, and none is missing."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.docs.blocks import ROOT

CASES = re.compile(r"^(?:\s*(?:async )?def (?=test_)|## )(\w+)", re.MULTILINE)
"""Tests, and stories in a table."""
SCENARIO_COUNT = 53
PROMISE_COUNT = 65


def listed(path: str) -> dict[str, list[dict[str, Any]]]:
    """Return the sections of a list of scenarios or promises."""
    sections: dict[str, list[dict[str, Any]]] = yaml.safe_load((ROOT / path).read_text())
    return sections


SCENARIOS = listed("tests/scenarios/scenarios.yaml")
PROPOSALS = listed("tests/kafka/consumer/proposals.yaml")


def cases(folder: str) -> set[str]:
    """Return the names of all tests and stories in a folder."""
    paths = (ROOT / "tests" / folder).rglob("test_*.py")
    return {name for path in paths for name in CASES.findall(path.read_text())}


def shown_by(row: dict[str, Any]) -> list[str]:
    """Return the tests of a line."""
    return [name for kind in ("tests", "broker", "memory") for name in row.get(kind, ())]


def test_each_scenario_has_one_line_with_its_source() -> None:
    told = [row["scenario"] for row in SCENARIOS["scenarios"]]
    assert len(told) == len(set(told)) == SCENARIO_COUNT
    assert all(row["source"] and row["here"] for row in SCENARIOS["scenarios"])
    assert all(row["promise"] and row["how"] for row in SCENARIOS["fencing"])


def test_each_promise_of_a_proposal_has_one_line() -> None:
    told = [row["promise"] for rows in PROPOSALS.values() for row in rows]
    assert len(told) == PROMISE_COUNT
    assert all(told)


def test_each_line_names_tests_that_exist() -> None:
    existing = cases("")
    for rows in (*SCENARIOS.values(), *PROPOSALS.values()):
        for row in rows:
            names, files = shown_by(row), row.get("files", ())
            assert names or files, row
            assert set(names) <= existing, set(names) - existing
            assert all((ROOT / file).exists() for file in files), files


def test_scenario_tests_are_listed() -> None:
    named = {name for rows in SCENARIOS.values() for row in rows for name in shown_by(row)}
    assert cases("scenarios") <= named
