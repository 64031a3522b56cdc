"""docs/streaming.md: its example loads, and the named settings exist."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance import KafkaConsumerResource
from tests.docs.blocks import ROOT, run_block

if TYPE_CHECKING:
    import pytest

PAGE = "docs/streaming.md"


def test_streaming_example_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BROKERS", "nowhere:9092")
    names: dict[str, Any] = {"__name__": "pasted"}
    run_block(PAGE, (ROOT / "docs/streaming/definitions.py").read_text(), names)
    defs: dg.Definitions = names["defs"]
    assert defs.resolve_job_def("kafka_stream").name == "kafka_stream"
    assert defs.resolve_sensor_def("kafka_stream_sensor").name == "kafka_stream_sensor"


def test_recommended_conditions_exist() -> None:
    conditions = re.findall(r"`(dg\.\S*\)|\.without\S*\))`", (ROOT / PAGE).read_text())
    _, late, missing = (one for one in conditions if "AutomationCondition" in one)
    assert len(eval(late + missing, {"dg": dg}).children) == 3  # noqa: S307 - as a reader pastes it


def test_settings_of_the_streaming_page_exist() -> None:
    text = (ROOT / PAGE).read_text()
    (sentence,) = re.findall(r"- (`max_ranges_per_run`.*?effect\.)", text, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", sentence))
    assert named <= KafkaConsumerResource.model_fields.keys()
