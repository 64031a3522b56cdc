"""A branch deployment never takes production's partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance import build_kafka_batch_defs, build_kafka_stream_defs
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.per_batch import batch_sensor
from dagster_rebalance.orchestration.per_batch.hosted_members import MEMBERS
from dagster_rebalance.orchestration.resources.kafka import BRANCH_VARIABLE
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import SLOT_TAG, STREAM_TAG
from dagster_rebalance.orchestration.streaming import stream_sensor
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.orchestration.parts import GROUPS, kafka_in_memory

if TYPE_CHECKING:
    from tests.orchestration.parts import KafkaInMemory


@pytest.fixture(autouse=True)
def _ticks_are_real(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batch_sensor, stream_sensor):
        monkeypatch.setattr(module, "is_real_tick", lambda _context: True)


@pytest.fixture
def _in_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BRANCH_VARIABLE, "1")


@dg.asset(required_resource_keys={"kafka_batch"})
def orders() -> None:
    """Does nothing."""


@dg.asset(name="orders")
def streamed(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates it
    """Does nothing."""


def defs_of(kafka: KafkaInMemory, *, streams: bool) -> dg.Definitions:
    if streams:
        return build_kafka_stream_defs(kafka=kafka, assets=[streamed], name="shop")
    return build_kafka_batch_defs(kafka=kafka, assets=[orders], name="shop")


def tick(defs: dg.Definitions, instance: dg.DagsterInstance, kafka: KafkaInMemory) -> Any:  # noqa: ANN401 - as Dagster has it
    context = dg.build_sensor_context(
        instance, definitions=defs, sensor_name="shop_sensor", resources={"kafka": kafka}
    )
    with context:
        return defs.resolve_sensor_def("shop_sensor").evaluate_tick(context)


@pytest.mark.usefixtures("_in_branch")
@pytest.mark.parametrize("streams", [False, True])
def test_branch_deployment_does_not_join(instance: dg.DagsterInstance, *, streams: bool) -> None:
    kafka = kafka_in_memory()
    said = tick(defs_of(kafka, streams=streams), instance, kafka)
    assert "branch deployment" in said.skip_message
    assert "branch_group_id" in said.skip_message
    assert not said.run_requests
    assert not any(kafka.group_id in str(key) for key in MEMBERS._members)


@pytest.mark.usefixtures("_in_branch")
def test_re_executed_streaming_run_in_branch_deployment_does_not_join(
    instance: dg.DagsterInstance,
) -> None:
    job = defs_of(kafka_in_memory(), streams=True).resolve_job_def("shop")
    with pytest.raises(ConfigurationError, match="does not join group"):
        job.execute_in_process(instance=instance, tags={STREAM_TAG: "here:shop_sensor"})


@pytest.mark.usefixtures("_in_branch")
def test_branch_deployment_with_branch_group_reads(instance: dg.DagsterInstance) -> None:
    kafka = kafka_in_memory(branch_group_id="shop-branch")
    assert kafka.group_id == "shop-branch"
    assert kafka.consumer_config()["group.id"] == "shop-branch"
    assert kafka.why_not_to_join == ""
    defs = defs_of(kafka, streams=True)
    offsets = GroupAssets.of("shop-branch").offsets
    assert offsets in {spec.key for spec in defs.resolve_all_asset_specs()}
    GROUPS["shop-branch"] = FakeGroup({"orders": 1})
    said = tick(defs, instance, kafka)
    assert [request.tags[SLOT_TAG] for request in said.run_requests] == ["0"]


def test_branch_group_is_ignored_in_production() -> None:
    kafka = kafka_in_memory(branch_group_id="shop-branch")
    assert kafka.group_id != "shop-branch"
    assert kafka.why_not_to_join == ""


@pytest.mark.parametrize("value", ["", "0"])
def test_full_deployment_is_no_branch_deployment(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BRANCH_VARIABLE, value)
    assert kafka_in_memory().why_not_to_join == ""
