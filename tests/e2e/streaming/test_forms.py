"""Async assets, multi-assets and Dagster Pipes in one streaming run, with Kafka and Dagster."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import dagster as dg
import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import TopicPartition as Partition

from dagster_rebalance.testing.deadline import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.deployment import DagsterDeployment

pytestmark = [pytest.mark.e2e, pytest.mark.broker]
BATCHES = 3


def produce(kafka: KafkaCluster, value: str) -> None:
    """Write a record."""
    producer = Producer(kafka.client_config())
    producer.produce("forms", value.encode())
    producer.flush(120)


def committed(kafka: KafkaCluster) -> int:
    """The committed offset; 0 while Kafka does not say."""
    consumer = Consumer({**kafka.client_config(), "group.id": "forms"})
    try:
        (found,) = consumer.committed([Partition("forms", 0)], timeout=120)
        return max(0, found.offset)
    except KafkaException:  # the coordinator of a new group has to be found first
        return 0
    finally:
        consumer.close()


def materializations(instance: dg.DagsterInstance, key: str) -> list[dg.AssetMaterialization]:
    """Those of an asset, oldest first."""
    found = instance.fetch_materializations(dg.AssetKey(key), limit=100, ascending=True).records
    return [one.asset_materialization for one in found if one.asset_materialization is not None]


def test_async_pipes_and_multi_assets_process_batches_of_one_run(
    kafka_broker: KafkaCluster, dagster: DagsterDeployment, root: Path
) -> None:
    folder = root / "forms"
    kafka_broker.create_topic("forms", 1)
    with dagster.instance() as instance:
        dagster.ui.start_sensor("shop", "forms_sensor")
        for number in range(BATCHES):
            produce(kafka_broker, f"record {number}")
            wait_until(
                lambda number=number: committed(kafka_broker) == number + 1 or None,  # type: ignore[misc]
                timeout_s=240,
                what=f"batch {number} to be committed",
                interval_s=0.2,
            )
        dagster.ui.stop_sensor("shop", "forms_sensor")
        (run,) = instance.get_runs(dg.RunsFilter(job_name="forms"))
        said = " ".join(entry.message for entry in instance.all_logs(run.run_id))
        process = re.search(r"Executing steps in process \(pid: (\d+)\)", said)
        assert process is not None
        os.kill(int(process[1]), signal.SIGTERM)
        assert dagster.wait_for_run(run.run_id, timeout_s=240).status is dg.DagsterRunStatus.SUCCESS
        lines = [f"record {number}" for number in range(BATCHES)]
        assert (folder / "by_client").read_text().splitlines() == lines
        assert (folder / "even").read_text().splitlines() == lines
        assert (folder / "closed").exists()
        _is_shown(instance, run.run_id)


def _is_shown(instance: dg.DagsterInstance, run_id: str) -> None:
    for key, count in {
        "by_client": BATCHES,
        "even": BATCHES,
        "odd": 0,
        "by_child": BATCHES,
    }.items():
        assert len(materializations(instance, key)) == count, key
    even, child = (materializations(instance, key)[-1] for key in ("even", "by_child"))
    client = materializations(instance, "by_client")[-1]
    assert client.metadata["written"].value == 1
    assert even.metadata["run"].value == run_id
    tags = (client.tags or {}), (even.tags or {})
    version = tags[0]["dagster/data_version"]
    assert tags[1]["dagster/input_data_version/by_client"] == version
    assert (child.tags or {})["dagster/data_version"] == "of the child"
    processes = {one.metadata["child"].value for one in materializations(instance, "by_child")}
    assert len(processes) == BATCHES
    for key, name in (("even", "filled"), ("by_child", "whole")):
        check = dg.AssetCheckKey(dg.AssetKey(key), name)
        storage = instance.event_log_storage
        (latest,) = storage.get_latest_asset_check_execution_by_key([check]).values()
        assert latest.event is not None
        event = latest.event.dagster_event
        assert event is not None
        assert event.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION
        assert event.asset_check_evaluation_data.passed
