"""`only` on a real Kafka, in both forms: ranges without a hit are committed without the asset."""

# No `from __future__ import annotations` here: Dagster evaluates the annotation of a batch.

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import dagster as dg
import pytest
from confluent_kafka import Producer

from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model.claims import LEFT_OUT
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.definitions import (
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from dagster_rebalance.orchestration.member.dependencies import MemberDependencies
from dagster_rebalance.orchestration.member.filter_scanner import FilterScanner
from dagster_rebalance.orchestration.per_batch.hosted_members import HostedMember
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource, RecordFilter
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.commit_history import metadata_of
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import STREAM_TAG, run_config, run_tags
from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker
ORDERS = RecordFilter(header_equals={"kind": "order"}, tombstones=False)


def produced(kafka: KafkaCluster, topic: str) -> list[int]:
    """Produce to three partitions, and return their ends. Only the second one has orders."""
    producer = Producer(kafka.client_config())
    for number in range(1_500):
        producer.produce(topic, b"x", partition=0, headers=[("kind", b"audit")])
        kind = b"order" if number in {700, 1_499} else None
        producer.produce(topic, b"%d" % number, partition=1, headers=[("kind", kind)])
    for _ in range(10):
        producer.produce(topic, None, key=b"k", partition=2, headers=[("kind", b"order")])
    assert producer.flush(120) == 0
    return [1_500, 1_500, 10]


def resource(kafka: KafkaCluster, topic: str) -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers=kafka.bootstrap_servers,
        group_id=topic,
        topics=[topic],
        only=ORDERS,
        min_records=1,
        max_wait_s=0,
        max_records_per_range=1_000,
    )


def committed(kafka: KafkaConsumerResource, topic: str) -> list[int | None]:
    partitions = [TopicPartition(topic, number) for number in range(3)]
    try:
        with kafka.connect() as consumer:
            stored = consumer.committed(partitions)
    except BrokerError:  # the coordinator of a new group has to be found first
        return []
    return [None if (at := stored[one]) is None else at.offset for one in partitions]


@contextmanager
def member_of(
    kafka: KafkaConsumerResource, instance: dg.DagsterInstance
) -> Iterator[MemberDependencies]:
    """The member of a sensor."""
    only = kafka.predicate()
    assert only is not None
    with ExitStack() as stack:
        yield MemberDependencies(
            consumer=stack.enter_context(kafka.connect()),
            engine=Engine(
                kafka.engine_settings(),
                new_batch_id=lambda _: f"b-{time.monotonic_ns()}",
                now=time.monotonic(),
            ),
            runs=RunLedger(instance, kafka.group_id),
            catalogue=Catalogue(
                instance, GroupAssets.of(kafka.group_id), MemberIdentity("here", "sensor", "1")
            ),
            topics=kafka.topics,
            scanner=stack.enter_context(closing(FilterScanner(only, kafka.reader()))),
        )


def test_per_batch_form_makes_runs_for_ranges_with_a_hit_only(
    instance: dg.DagsterInstance, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(3)
    ends = produced(kafka_broker, topic)
    kafka = resource(kafka_broker, topic)
    seen: list[bytes | None] = []
    shown: list[dict[str, Any]] = []

    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> dg.MaterializeResult:  # type: ignore[type-arg]
        seen.extend(one.value() for one in kafka_batch.messages())
        shown.append(kafka_batch.metadata())
        return dg.MaterializeResult(metadata=shown[-1])

    job = build_kafka_batch_defs(kafka=kafka, assets=[orders], name="filtered").resolve_job_def(
        "filtered"
    )
    member = HostedMember("here", lambda: member_of(kafka, instance), shutdown_timeout_s=60)
    known = set()

    def has_committed_all() -> bool:
        mail, _ = member.tick()
        for request in mail.batch_requests:
            if request.run_key not in known:
                known.add(request.run_key)
                config, tags = run_config(request, "kafka_batch"), run_tags(request, topic)
                job.execute_in_process(run_config=config, tags=tags, instance=instance)
        return committed(kafka, topic) == ends

    wait_until(lambda: has_committed_all() or None, timeout_s=120, what="the commits")
    offsets = GroupAssets.of(topic).offsets

    def left_out() -> dict[str, int]:
        found: dict[str, int] = {}
        for record in instance.fetch_materializations(offsets, limit=100).records:
            partition, metadata = str(record.partition_key), metadata_of(record)
            part = metadata.get("left_out_offsets", 0)
            assert isinstance(part, int)
            found[partition] = found.get(partition, 0) + part
            if part:
                assert metadata["run"] == LEFT_OUT
        return found

    expected = {f"{topic}-0": 1_500, f"{topic}-1": 0, f"{topic}-2": 10}
    wait_until(lambda: left_out() == expected or None, timeout_s=120, what="the records of commits")
    member.leave("the test ends")
    member.join(time.monotonic() + 120)
    assert seen == [b"700", b"1499"]
    assert [one["left_out"] for one in shown] == [999, 499]
    assert len(known) == 2


def test_streaming_form_calls_no_asset_for_a_batch_without_a_hit(
    instance: dg.DagsterInstance, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(3)
    ends = produced(kafka_broker, topic)
    kafka = resource(kafka_broker, topic)
    seen: list[bytes] = []
    left_out: list[int] = []
    producer = Producer({**kafka_broker.client_config(), "linger.ms": 1_000})

    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        rows = kafka_batch.arrow().read_all().column("value").to_pylist()
        assert rows, "the asset is called for a batch without a hit"
        seen.extend(rows)
        left_out.append(kafka_batch.left_out_records)
        if b"1499" in rows:  # then a batch without a hit, and one that ends the test
            for partition, kind in ((0, b"audit"), (2, b"order")):
                for _ in range(5):
                    value = None if kind == b"audit" else b"last"
                    producer.produce(topic, value, partition=partition, headers=[("kind", kind)])
                producer.flush(120)
        if b"last" in rows and committed(kafka, topic)[:1] == [ends[0] + 5]:
            os.kill(os.getpid(), signal.SIGTERM)
        elif b"last" in rows:
            producer.produce(topic, b"last", partition=2, headers=[("kind", b"order")])
            producer.flush(120)

    job = build_kafka_stream_defs(kafka=kafka, assets=[orders], name="filtered")
    job.resolve_job_def("filtered").execute_in_process(
        instance=instance, tags={STREAM_TAG: "here:filtered"}
    )
    assert sorted(set(seen)) == [b"1499", b"700", b"last"]
    assert committed(kafka, topic)[:2] == [ends[0] + 5, ends[1]]
