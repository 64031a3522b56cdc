"""A group reads the topics that fit a pattern, also those that are created later.

On a real Kafka, in both protocols.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, Literal

import dagster as dg
import pytest
from confluent_kafka import Producer

from dagster_rebalance import KafkaBatch, KafkaConsumerResource, build_kafka_stream_defs
from dagster_rebalance.kafka.member.topic_discovery import Discovery
from dagster_rebalance.orchestration.reporting.checks import STOPPED_CHECK
from dagster_rebalance.orchestration.reporting.group_snapshot import scan_group
from dagster_rebalance.orchestration.storage.run_tags import STREAM_TAG
from dagster_rebalance.testing.fixtures import unique_name

if TYPE_CHECKING:
    from dagster_rebalance.testing.broker import KafkaCluster

pytestmark = pytest.mark.broker


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_topic_created_later_is_read(
    instance: dg.DagsterInstance,
    kafka_broker: KafkaCluster,
    protocol: Literal["consumer", "classic"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing has to be deployed for it. Others whose names only contain the pattern are not."""
    set_subscription = Discovery.set_subscription

    def set_and_refresh_often(discovery: Discovery, subscription: Any) -> None:  # noqa: ANN401 - names or a pattern
        discovery._interval_s = 1.0
        set_subscription(discovery, subscription)

    monkeypatch.setattr(Discovery, "set_subscription", set_and_refresh_often)
    name = unique_name("shop")
    kafka = KafkaConsumerResource(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        group_id=name,
        topics=[f"^{name}-"],
        group_protocol=protocol,
    )
    producer = Producer(kafka_broker.client_config())
    values: list[bytes | None] = []

    def sell(topic: str) -> None:
        kafka_broker.create_topic(topic, 1)
        producer.produce(topic, topic)
        assert producer.flush(120) == 0

    sell(f"other-{name}-a")

    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        values.extend(message.value() for message in kafka_batch.messages())
        if len(values) == 1:
            sell(f"{name}-b")
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    sell(f"{name}-a")
    defs = build_kafka_stream_defs(kafka=kafka, assets=[orders], name="stream")
    defs.resolve_job_def("stream").execute_in_process(
        instance=instance, tags={STREAM_TAG: "here:sensor"}
    )
    assert values == [f"{name}-a".encode(), f"{name}-b".encode()]
    with kafka.connect() as consumer:
        look = scan_group(consumer, kafka.topics, lambda _: {}, kafka.engine_settings().start_from)
    assert (look.topics, look.missing) == ((f"{name}-a", f"{name}-b"), ())
    checks = dg.Definitions(asset_checks=list(defs.asset_checks or ()), resources={"kafka": kafka})
    result = checks.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance)
    said = {one.check_name: one for one in result.get_asset_check_evaluations()}
    assert said[STOPPED_CHECK].passed
