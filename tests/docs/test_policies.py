"""docs/failures.md has each policy, docs/bad-records.md the dead letter that a member writes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_args

import pytest

from dagster_rebalance import KafkaConsumerResource
from dagster_rebalance.core.model.commands import StoreDeadLetter
from dagster_rebalance.orchestration.reporting.dead_letters import (
    MOST_ERROR_CHARACTERS,
    DeadLetters,
)
from tests.docs.blocks import ROOT, block_with, run_block
from tests.orchestration.parts import span

if TYPE_CHECKING:
    from dagster_rebalance.core.model.letters import Headers
    from dagster_rebalance.kafka.producers.dead_letter_producer import Delivery

PAGE = "docs/bad-records.md"
POLICIES = "docs/failures.md"


class Kept:
    """Records the produced messages."""

    value = b""

    def send(self, key: str, value: bytes | None, headers: Headers) -> None:
        """Keep it."""
        self.value = value or b""

    def deliveries(self) -> tuple[Delivery, ...]:
        """Nothing ends."""
        return ()


def executed(example: str) -> dict[str, Any]:
    """The names that an example defines."""
    names: dict[str, Any] = {}
    run_block(PAGE, example, names)
    return names


@pytest.mark.parametrize("setting", ["on_deadline", "on_leave", "on_lost", "on_failure"])
def test_policy_table_has_each_policy_and_marks_the_default(setting: str) -> None:
    field = KafkaConsumerResource.model_fields[setting]
    rows = [
        line
        for line in (ROOT / POLICIES).read_text().splitlines()
        if line.startswith(f'| `{setting}="')
    ]
    words = {
        value: " (default)" if value == field.default else ""
        for value in get_args(field.annotation)
    }
    assert {row.split(" | ")[0] for row in rows} == {
        f'| `{setting}="{value}"`{mark}' for value, mark in words.items()
    }
    assert all(row.count(" | ") == 2 for row in rows), "behavior, lost or doubled"


def test_dead_letter_of_the_page_has_the_fields_of_a_real_one() -> None:
    kept = Kept()
    DeadLetters(kept, "orders").store(
        StoreDeadLetter(span(0), 1, "b-1", ("r1", "r2")), "the run failed"
    )
    text = " ".join((ROOT / PAGE).read_text().split())
    assert all(f"`{name}`" in text for name in json.loads(kept.value))
    assert f"at most {MOST_ERROR_CHARACTERS:,} characters" in text


def test_policy_settings_of_the_example_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BROKERS", "kafka:9092")
    settings = (
        executed(block_with(PAGE, "python", "on_failure="))["kafka"]
        .process_config_and_initialize()
        .engine_settings()
    )
    assert (settings.dead_letter_topic, settings.max_attempts) == ("orders-dead", 3)
