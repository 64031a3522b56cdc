"""docs/scenarios.md: one line per scenario, with its source and an existing test."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "scenarios.md").read_text()
CASES = re.compile(r"^(?:\s*(?:async )?def (?=test_)|## )(\w+)", re.MULTILINE)
"""Tests, and stories in a table."""
HEADERS = re.compile(r"\|(-|.* shown by)")
LAST_SECTION = "## Fencing to the end"
SCENARIOS, PROMISES = PAGE.split(LAST_SECTION)
COUNT = 53
PROMISE_COUNT = 5


def rows(text: str) -> list[list[str]]:
    """The lines of all tables, without their headers, as columns."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not HEADERS.match(line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_each_scenario_has_one_line() -> None:
    assert len(rows(SCENARIOS)) == COUNT
    assert len(rows(PROMISES)) == PROMISE_COUNT
    told = [scenario for scenario, *_ in rows(PAGE)]
    assert len(set(told)) == len(told)


def test_each_test_that_is_named_exists() -> None:
    defined = [
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in CASES.findall(path.read_text())
    ]
    shown_by = " ".join(row[-1] for row in rows(PAGE))
    for name in {*re.findall(r"`(test_\w+)`", PAGE), *re.findall(r"`(\w+)`", shown_by)}:
        assert name in defined, name


@pytest.mark.parametrize("row", rows(SCENARIOS), ids=lambda row: row[0][:40])
def test_each_line_has_a_source_and_names_what_shows_it(row: list[str]) -> None:
    _, source, here, shown_by = row
    assert re.search(r"\w", source)
    if not re.search(r"`\w+`", shown_by):
        assert len(here.partition("cannot happen here: ")[2]) > len("cannot happen"), here


def test_each_scenario_that_is_played_on_purpose_is_listed() -> None:
    played = {
        name
        for path in (ROOT / "tests" / "scenarios").glob("test_*.py")
        for name in CASES.findall(path.read_text())
    }
    assert played <= set(re.findall(r"`(test_\w+)`", PAGE))
