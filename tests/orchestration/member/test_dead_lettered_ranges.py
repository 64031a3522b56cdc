"""Redelivered dead letters, which any producer with WRITE on the topic can forge.

A forged letter must neither select the records that a run reads nor repeat a range.
"""

from __future__ import annotations

import json
from typing import Any

import dagster as dg
import pytest

from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.model.errors import BatchRefusedError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.dead_letters import dead_lettered_range
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from tests.orchestration.parts import span

COMMITS = 130
"""More than are read at once."""


@pytest.fixture(scope="module")
def instance() -> dg.DagsterInstance:
    """A group that recorded a dead letter for [0, 10) long ago.

    It has committed the following ranges of that partition.
    """
    made = dg.DagsterInstance.ephemeral()
    catalogue = Catalogue(made, GroupAssets.of("etl"), MemberIdentity("blue", "sensor", "p"))
    for number in range(COMMITS):
        wanted = OffsetRange("orders", 0, 10 * number, 10 * number + 10)
        commit = RecordCommit(
            wanted,
            1,
            "b",
            "r",
            lag=0,
            claim_to_commit_s=None,
            drain_s=None,
            is_dead_letter=number == 0,
        )
        catalogue.record_commits([commit])
    return made


def found(instance: dg.DagsterInstance, **changed: Any) -> OffsetRange:  # noqa: ANN401 - fields of all kinds
    """The range of the group's dead letter, with other values in some of its fields."""
    kafka = KafkaConsumerResource(bootstrap_servers="kafka:9092", group_id="etl", topics=["orders"])
    letter = {
        "topic": "orders",
        "partition": 0,
        "start": 0,
        "until": 10,
        "group_id": "etl",
        **changed,
    }
    return dead_lettered_range(instance, kafka, json.dumps(letter))


def test_dead_letter_older_than_many_commits_is_found(instance: dg.DagsterInstance) -> None:
    assert found(instance) == span(0, 0, 10)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"start": 5, "until": 15}, "no record of a dead letter of group etl for orders-0"),
        ({"start": 10, "until": 20}, "no record of a dead letter of group etl for orders-0"),
        ({"partition": 1}, "no record of a dead letter of group etl for orders-1"),
        ({"topic": "salaries"}, "does not belong to group etl and one of its topics"),
        ({"group_id": "another"}, "does not belong to group etl and one of its topics"),
        ({"topic": "a/../b"}, "not a dead letter"),
        ({"until": None}, "not a dead letter"),
        ({"partition": "0"}, "not a dead letter"),
        ({"topic": 7}, "not a dead letter"),
        ({"start": 10, "until": 0}, "not a dead letter"),
    ],
)
def test_letter_that_dagster_does_not_confirm_is_refused(
    instance: dg.DagsterInstance, changed: dict[str, Any], says: str
) -> None:
    """A forged letter could double a range or read any topic with the rights of the group."""
    with pytest.raises(BatchRefusedError, match=says):
        found(instance, **changed)


def test_record_that_is_no_letter_is_refused(instance: dg.DagsterInstance) -> None:
    kafka = KafkaConsumerResource(bootstrap_servers="kafka:9092", group_id="etl", topics=["orders"])
    for letter in ("", "[]", "7", b"\xff"):
        with pytest.raises(BatchRefusedError, match="not a dead letter"):
            dead_lettered_range(instance, kafka, letter)
