"""The ranges that a group has recorded as dead letters: any producer can forge a letter."""

from __future__ import annotations

import dagster as dg
import pytest

from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.dead_letters import recorded_letters
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


def test_only_recorded_dead_letters_are_confirmed(instance: dg.DagsterInstance) -> None:
    """Also one that is older than many commits. A forged letter could double a range."""
    offsets = GroupAssets.of("etl").offsets
    failed = span(0, 0, 10)
    asked = [failed, span(0, 5, 15), span(0, 10, 20), span(1, 0, 10)]
    assert recorded_letters(instance, offsets, asked) == {failed}
    assert recorded_letters(instance, offsets, []) == frozenset()
    assert recorded_letters(instance, GroupAssets.of("another").offsets, asked) == frozenset()
