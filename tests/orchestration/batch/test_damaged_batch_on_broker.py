"""A run fails on a batch that is damaged on the broker's disk, in each form of its records."""

# No `from __future__ import annotations` here: Dagster evaluates the annotation of a batch.

from collections.abc import Callable

import dagster as dg
import pytest

from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.kafka.client.confluent import to_commit
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.definitions import build_kafka_batch_defs
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.run_tags import run_config, run_tags
from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.existing_kafka import ExistingKafka
from dagster_rebalance.testing.fixtures import TopicFactory, unique_name
from tests.kafka.damage import EACH, break_byte, produce_batches
from tests.kafka.readers import commit_by_hand
from tests.orchestration.parts import batch_request, claimed

FORMS: dict[str, Callable[[KafkaBatch], object]] = {
    "messages": lambda batch: list(batch.messages()),
    "arrow": lambda batch: batch.arrow().read_all(),
}


@pytest.mark.broker
@pytest.mark.parametrize("form", FORMS)
def test_run_on_damaged_batch_fails_with_its_offset(
    instance: dg.DagsterInstance,
    kafka_broker: KafkaCluster,
    kafka_topic: TopicFactory,
    form: str,
) -> None:
    if isinstance(kafka_broker, ExistingKafka):
        pytest.skip("this test writes to the log files of the broker")
    topic = kafka_topic()
    produce_batches(kafka_broker, topic, 0, "zstd")
    break_byte(kafka_broker, topic, 0)
    kafka = KafkaConsumerResource(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        group_id=unique_name("group"),
        topics=[topic],
    )

    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        FORMS[form](kafka_batch)

    job = build_kafka_batch_defs(kafka=kafka, assets=[orders]).resolve_job_def("kafka_batches")
    batch_id = unique_name("batch")
    wanted = batch_request(batch_id, range_ := OffsetRange(topic, 0, 0, 3 * EACH))
    claim = to_commit(range_.topic_partition, claimed(0, 3 * EACH, batch_id))
    commit_by_hand({**kafka_broker.client_config(), "group.id": kafka.group_id}, claim)
    result = job.execute_in_process(
        instance=instance,
        tags=run_tags(wanted, kafka.group_id),
        run_config=run_config(wanted, "kafka_batch"),
        raise_on_error=False,
    )
    assert not result.success
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    assert f"{topic}-0 at offset {EACH}: MessageSet" in str(failure.event_specific_data)
    assert "failed CRC32C check" in str(failure.event_specific_data)
