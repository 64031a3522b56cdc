"""docs/policies.md has every policy that the settings offer, and the dead letter that a member writes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, get_args

import dagster as dg
import pytest

from dagster_rebalance import KafkaConsumerResource
from dagster_rebalance.core.commands import StoreDeadLetter
from dagster_rebalance.orchestration.dead_letters import MOST_ERROR_CHARACTERS, DeadLetters
from dagster_rebalance.orchestration.runs import RunLedger
from tests.docs.blocks import ROOT, block_with
from tests.orchestration.parts import span

if TYPE_CHECKING:
    from dagster_rebalance.consumer.dead_letters import Delivery

PAGE = "docs/policies.md"


class Kept:
    """Keeps what it is given to send."""

    value = ""

    def send(self, key: str, value: str) -> None:  # noqa: ARG002 - the signature of a sender
        """Keep it."""
        self.value = value

    def deliveries(self) -> tuple[Delivery, ...]:
        """Nothing ends."""
        return ()


@pytest.mark.parametrize("setting", ["on_deadline", "on_lost", "on_failure"])
def test_every_policy_has_a_row_and_the_default_is_marked(setting: str) -> None:
    """What a policy means for lost and doubled is the reason to choose it."""
    field = KafkaConsumerResource.model_fields[setting]
    rows = [line for line in (ROOT / PAGE).read_text().splitlines() if line.startswith(f'| `{setting}="')]
    words = {value: " (default)" if value == field.default else "" for value in get_args(field.annotation)}
    assert {row.split(" | ")[0] for row in rows} == {f'| `{setting}="{value}"`{mark}' for value, mark in words.items()}
    assert all(row.count(" | ") == 4 for row in rows), "what happens, lost, doubled, order"


def test_the_dead_letter_of_the_page_has_the_fields_of_a_real_one() -> None:
    """Programs read it."""
    kept = Kept()
    with dg.DagsterInstance.ephemeral() as instance:
        DeadLetters(kept, RunLedger(instance, "orders"), "orders").store(StoreDeadLetter(span(0), 1, "b-1", ("r1", "r2")))
    real, shown = json.loads(kept.value), json.loads(block_with(PAGE, "json", "run_ids"))
    assert {name: type(value) for name, value in shown.items()} == {name: type(value) for name, value in real.items()}
    assert f"at most {MOST_ERROR_CHARACTERS:,} characters" in " ".join((ROOT / PAGE).read_text().split())
