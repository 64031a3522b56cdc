"""The page on monitoring has the events and metrics of the code; their files name real ones."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import promql_parser as promql
import pytest
import yaml

from dagster_rebalance.core.model.member_events import EVENT_SPECS
from dagster_rebalance.core.reporting.metrics import OF_EACH, Form, Metric
from tests.docs.blocks import ROOT
from tests.orchestration.scrape import everything, series

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TABLES = "docs/monitoring.md"
PROMTOOL = shutil.which("promtool")
PREFIX = "dagster_rebalance."
SHORT = {"messaging.destination.name": "topic", "messaging.destination.partition.id": "partition"}
RANGE = "topic, partition, start, until"
_GENERAL = {"le", "instance", "job"}


def short(name: str) -> str:
    """Shorten a name as the page does, which states the prefix once."""
    return SHORT.get(name, name.removeprefix(PREFIX))


def log_table() -> str:
    """The events of the log as a Markdown table."""
    rows = [
        f"| `{short(what.value)}` | {logging.getLevelName(kind.level)} "
        f"| {', '.join(kind.fields).replace(RANGE, '*range*')} | {kind.meaning} |"
        for what, kind in EVENT_SPECS.items()
    ]
    return "\n".join(["| event | level | fields | |", "|---|---|---|---|", *rows])


def metric_table() -> str:
    """The metrics as a Markdown table."""
    rows = [
        f"| `{short(metric.value.name)}` | {metric.value.form.value}"
        f"{', s' if metric.value.unit == 's' else ''} "
        f"| {', '.join(short(name) for name in metric.value.attributes)} "
        f"| {metric.value.description} |"
        for metric in Metric
    ]
    return "\n".join(["| metric | kind | by | |", "|---|---|---|---|", *rows])


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """Each series of Prometheus with its labels, as the real exporter names them."""
    return series(everything())


def test_table_of_events_is_that_of_the_code() -> None:
    table = log_table()
    assert table in (ROOT / TABLES).read_text(), f"{TABLES} should have:\n{table}"


def test_table_of_metrics_is_that_of_the_code() -> None:
    table = metric_table()
    assert table in (ROOT / TABLES).read_text(), f"{TABLES} should have:\n{table}"


def test_metric_has_the_documented_attributes(
    known: dict[str, set[str]],
) -> None:
    for metric in Metric:
        kind = metric.value
        name = kind.name.replace(".", "_") + ("_seconds" if kind.unit == "s" else "")
        name += {Form.COUNTER: "_total", Form.HISTOGRAM: "_count", Form.GAUGE: ""}[kind.form]
        labels = {attribute.replace(".", "_") for attribute in (*OF_EACH, *kind.attributes)}
        assert labels <= known[name], name


def _queries() -> Iterator[tuple[str, str]]:
    rules = yaml.safe_load((ROOT / "docs/monitoring/alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule.keys() >= {"alert", "expr", "labels", "annotations"}
            assert rule["annotations"].keys() == {"summary", "description"}
            yield rule["alert"], rule["expr"]
    for panel in _dashboard()["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def _dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "docs/monitoring/grafana.json").read_text())
    return loaded


def _selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """The series that a query asks for, with the labels that it chooses by."""
    text = query.replace("$__rate_interval", "5m").replace("$group", ".*")
    parsed = promql.parse(text)
    found: list[Any] = []
    promql.walk(parsed, found.append)
    for node in found:
        if isinstance(node, promql.VectorSelector):
            yield str(node.name), {matcher.name for matcher in node.matchers.matchers}


@pytest.mark.parametrize(("where", "query"), list(_queries()))
def test_query_uses_only_existing_metrics(
    where: str, query: str, known: dict[str, set[str]]
) -> None:
    selectors = list(_selectors(query))
    assert selectors, where
    for name, labels in selectors:
        assert name in known, f"{where}: {name}"
        assert labels <= known[name] | _GENERAL, f"{where}: {labels}"
    grouped = {
        label.strip() for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(",")
    }
    every = set.union(*(known[name] for name, _ in selectors))
    assert grouped <= every | _GENERAL, f"{where}: {grouped}"


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")
def test_alert_fires_only_under_its_condition(tmp_path: Path) -> None:
    """Runs Prometheus itself, also for a counter that begins with its first event."""
    rules = yaml.safe_load((ROOT / "docs/monitoring/alerts.yaml").read_text())
    scenarios = yaml.safe_load((ROOT / "tests/docs/alerts.yaml").read_text())
    fired = {
        check["alertname"]
        for scenario in scenarios["tests"]
        for check in scenario["alert_rule_test"]
        if "exp_alerts" in check
    }
    assert fired == {rule["alert"] for rule in rules["groups"][0]["rules"]}
    _promtool("check", "rules", str(ROOT / "docs/monitoring/alerts.yaml"))
    for rule in rules["groups"][0]["rules"]:
        del rule["annotations"]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
    (tmp_path / "scenarios.yaml").write_text(yaml.safe_dump(scenarios))
    _promtool("test", "rules", str(tmp_path / "scenarios.yaml"))


def _promtool(*arguments: str) -> None:
    done = subprocess.run([str(PROMTOOL), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_is_importable_and_shows_each_metric() -> None:
    dashboard = _dashboard()
    assert dashboard.keys() >= {"title", "uid", "schemaVersion", "templating", "panels"}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    text = json.dumps(dashboard)
    for metric in Metric:
        assert metric.value.name.replace(".", "_") in text, metric.value.name
