"""Checks of the recorded history of a group, reported by members or executed manually."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.model.commands import (
    Cause,
    HoldOutcome,
    Receipt,
    RecordCommit,
    ShowHold,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.operators.reset_offsets import Move
from dagster_rebalance.core.reporting.group_status import Kind, MemberRecord
from dagster_rebalance.orchestration.reporting import checks, member_tables
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import (
    DRAINED_CHECK,
    GAP_CHECK,
    build_history_checks,
    drained_result,
)
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from tests.orchestration.parts import kafka_in_memory, span, tp

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMIT = RecordCommit(span(0), 1, "b", "3f61351e-1", lag=0, claim_to_commit_s=None, drain_s=None)
RECEIPT = Receipt(
    outcome=HoldOutcome.DRAINED,
    cause=Cause.REVOKE,
    partitions=(tp(0),),
    seconds=2.0,
    committed={},
    run_ids=("3f61351e-1",),
    cancelled=(),
    handed_over=(),
)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def member(instance: dg.DagsterInstance, assets: GroupAssets, name: str = "blue") -> Catalogue:
    return Catalogue(instance, assets, MemberIdentity(name, "sensor", f"process of {name}"))


def told(instance: dg.DagsterInstance, asset: dg.AssetKey, check: str) -> list[bool]:
    found = instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(asset, check), limit=100
    )
    return [record.evaluation.passed for record in reversed(found) if record.evaluation]


def by_hand(instance: dg.DagsterInstance, group_id: str, check: str) -> dg.AssetCheckEvaluation:
    assets = GroupAssets.of(group_id)
    checks = build_history_checks(assets.offsets, assets.group, "kafka")
    job = dg.Definitions(asset_checks=checks, resources={"kafka": kafka_in_memory()})
    result = job.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance)
    return next(e for e in result.get_asset_check_evaluations() if e.check_name == check)


def test_adjacent_commits_pass_the_gap_check_once(instance: dg.DagsterInstance) -> None:
    assets = GroupAssets.of("etl")
    catalogue = member(instance, assets)
    for start in (0, 10, 20):
        catalogue.record_commits([replace(COMMIT, range=span(0, start, start + 10))])
    assert told(instance, assets.offsets, GAP_CHECK) == [True]
    said = by_hand(instance, "etl", GAP_CHECK)
    assert said.passed
    assert said.description == "no gap; recorded commits compared: 3"


@pytest.mark.parametrize("events", [0, 250])
def test_offsets_skipped_by_a_reset_are_no_gap(instance: dg.DagsterInstance, events: int) -> None:
    """A quiet group has hundreds of events between two commits."""
    assets = GroupAssets.of("etl")
    catalogue = member(instance, assets)
    catalogue.record_commits([COMMIT])
    forward = Move(tp(0), OffsetAndMetadata(10), OffsetAndMetadata(25, ""))
    back = Move(tp(1), OffsetAndMetadata(9), OffsetAndMetadata(3, ""))
    catalogue.record_moves([forward, back], by="ada", reason="bad records")
    for strange in ("text", ["orders-0"], {"orders-0": 7, "orders": [0, 90], "orders-1": ["", 9]}):
        event = dg.AssetObservation(assets.group, metadata={"moves": dg.JsonMetadataValue(strange)})
        instance.report_runless_asset_event(event)
    for _ in range(events):
        instance.report_runless_asset_event(dg.AssetObservation(assets.group))
    catalogue.record_commits([replace(COMMIT, range=span(0, 25, 30))])
    assert told(instance, assets.offsets, GAP_CHECK) == [True, True]
    assert by_hand(instance, "etl", GAP_CHECK).passed


def test_gap_fails_the_check_and_links_the_runs_beside_it(
    instance: dg.DagsterInstance,
) -> None:
    assets = GroupAssets.of("etl")
    catalogue = member(instance, assets)
    catalogue.record_commits([COMMIT])
    catalogue.record_commits([replace(COMMIT, range=span(0, 25, 30), run_id="9a0f22c1-2")])
    catalogue.record_commits([replace(COMMIT, range=span(0, 30, 40))])
    assert told(instance, assets.offsets, GAP_CHECK) == [True, False]
    said = by_hand(instance, "etl", GAP_CHECK)
    assert (said.passed, said.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert str(said.description).startswith(
        "no commit covers orders-0 [10, 25): run 3f61351e ended"
    )
    assert said.metadata["missing_offsets"].value == 15
    assert said.metadata["run 9a0f22c1"] == dg.MetadataValue.dagster_run("9a0f22c1-2")


def test_gap_older_than_many_commits_of_other_partitions_is_found(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_COMMITS_READ", 5)
    assets = GroupAssets.of("etl")
    catalogue = member(instance, assets)
    catalogue.record_commits([COMMIT])
    for start in range(0, 100, 10):
        catalogue.record_commits([replace(COMMIT, range=span(1, start, start + 10))])
    catalogue.record_commits([replace(COMMIT, range=span(0, 25, 30))])
    assert told(instance, assets.offsets, GAP_CHECK) == [True, False]


def test_old_gap_is_not_reported_again_by_a_new_member(instance: dg.DagsterInstance) -> None:
    assets = GroupAssets.of("etl")
    member(instance, assets).record_commits([COMMIT])
    member(instance, assets).record_commits([replace(COMMIT, range=span(0, 25, 30))])
    member(instance, assets).record_commits([replace(COMMIT, range=span(0, 30, 40))])
    assert told(instance, assets.offsets, GAP_CHECK) == [True, False]


@pytest.mark.parametrize("events", [0, 250])
def test_undrained_hold_is_not_reported_again_by_other_members(
    instance: dg.DagsterInstance, events: int
) -> None:
    assets = GroupAssets.of("etl")
    member(instance, assets).record_receipt(replace(RECEIPT, outcome=HoldOutcome.LOST))
    for _ in range(events):
        instance.report_runless_asset_event(dg.AssetObservation(assets.group))
    member(instance, assets, "green").record_receipt(RECEIPT)
    assert told(instance, assets.group, DRAINED_CHECK) == [False]


def test_drained_check_names_the_time_since_which_it_has_read(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = GroupAssets.of("etl")
    catalogue = member(instance, assets)
    for _ in range(5):
        catalogue.record_receipt(RECEIPT)
    monkeypatch.setattr(checks, "_EVENTS_READ", 5)
    said = str(by_hand(instance, "etl", DRAINED_CHECK).description)
    assert said == "holds of the last day: 5, all drained"
    monkeypatch.setattr(checks, "_EVENTS_READ", 3)
    said = str(by_hand(instance, "etl", DRAINED_CHECK).description)
    assert said.startswith("holds since 2")
    assert said.endswith("UTC: 3, all drained")


def test_many_events_remove_no_member_from_the_member_table(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_tables, "_READ_AT_ONCE", 5)
    monkeypatch.setattr(member_tables, "_EVENTS_READ", 40)
    assets = GroupAssets.of("etl")
    catalogue = member(instance, assets)
    catalogue.record_assigned([tp(0), tp(1)], "m-1")

    def dead_letters(count: int) -> None:
        for _ in range(count):
            instance.report_runless_asset_event(dg.AssetObservation(assets.group))

    def owners() -> list[object]:
        (newest,) = instance.fetch_observations(assets.group, limit=1).records
        assert newest.asset_observation is not None
        table = newest.asset_observation.metadata["members"]
        assert isinstance(table, dg.TableMetadataValue)
        return [record.data["member"] for record in table.records]

    dead_letters(30)
    member(instance, assets, "green").record_assigned([tp(2)], "m-2")
    assert owners() == ["blue", "green"]
    catalogue.record_hold(ShowHold(Cause.REVOKE, (tp(0),), ("r",), 10.0))
    dead_letters(60)
    catalogue.record_receipt(replace(RECEIPT, partitions=(tp(0),)))
    assert owners() == ["blue", "green"]


def test_manual_materializations_are_no_commits(instance: dg.DagsterInstance) -> None:
    assets = GroupAssets.of("etl")
    member(instance, assets).record_commits([COMMIT])
    for partition in ("orders-0", "a custom partition key", None):
        reported: tuple[dict[str, Any], ...] = ({}, {"start": 5, "until": 5, "run": "r"})
        for metadata in reported:
            made = dg.AssetMaterialization(assets.offsets, partition=partition, metadata=metadata)
            instance.report_runless_asset_event(made)
    assert by_hand(instance, "etl", GAP_CHECK).description == "no gap; recorded commits compared: 1"


@pytest.mark.parametrize("outcome", HoldOutcome)
def test_undrained_hold_is_a_warning_that_links_its_runs(
    instance: dg.DagsterInstance, outcome: HoldOutcome
) -> None:
    assets = GroupAssets.of("etl")
    member(instance, assets).record_receipt(replace(RECEIPT, outcome=outcome))
    is_bad = outcome in {HoldOutcome.DEADLINE, HoldOutcome.LOST, HoldOutcome.SUPERSEDED}
    assert told(instance, assets.group, DRAINED_CHECK) == [not is_bad]
    said = by_hand(instance, "etl", DRAINED_CHECK)
    assert (said.passed, said.severity) == (not is_bad, dg.AssetCheckSeverity.WARN)
    assert ("run 3f61351e" in said.metadata) is is_bad
    if is_bad:
        assert said.description == f"blue: {replace(RECEIPT, outcome=outcome)}"


def test_drained_holds_are_evaluated_once_and_each_undrained_one(
    instance: dg.DagsterInstance,
) -> None:
    assets = GroupAssets.of("etl")
    catalogue = member(instance, assets)
    for outcome in (
        HoldOutcome.DRAINED,
        HoldOutcome.DRAINED,
        HoldOutcome.LOST,
        HoldOutcome.DRAINED,
    ):
        catalogue.record_receipt(replace(RECEIPT, outcome=outcome))
    assert told(instance, assets.group, DRAINED_CHECK) == [True, False]
    catalogue.record_receipt(replace(RECEIPT, outcome=HoldOutcome.LOST))
    assert told(instance, assets.group, DRAINED_CHECK) == [True, False, False]


def test_hold_older_than_a_day_is_ignored() -> None:
    old = MemberRecord(Kind.HOLD, "p", "blue", at=0.0, outcome="lost", text="lost", run_ids=("r",))
    assert not drained_result([old], now=86_000.0).passed
    assert drained_result([old], now=87_000.0).passed
    many = drained_result([replace(old, at=float(at)) for at in range(9)], now=9.0)
    assert str(many.description).endswith("; and 4 more")
