"""Old runs are deleted beside a live group on a real Kafka, and nothing is lost or repeated."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from typing import TYPE_CHECKING

import dagster as dg
import pytest
from confluent_kafka import Producer

from dagster_rebalance import KafkaBatch, KafkaConsumerResource, build_kafka_stream_defs
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.core.reporting.explain_offset import explain_offset
from dagster_rebalance.kafka.log_bounds import read_bounds
from dagster_rebalance.orchestration.operators.pruning import KafkaPositions, Pruning
from dagster_rebalance.orchestration.storage.commit_history import processed
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.offset_lookup import OffsetLookup
from dagster_rebalance.orchestration.storage.run_tags import GROUP_TAG, SLOT_TAG, STREAM_TAG
from tests.orchestration.streaming.stage import QUICK

if TYPE_CHECKING:
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker
RECORDS = 20


class Shop:
    """A group whose streaming runs follow each other; each one prunes while it works."""

    def __init__(
        self, instance: dg.DagsterInstance, kafka_broker: KafkaCluster, topic: str
    ) -> None:
        self.instance = instance
        self.topic = topic
        self.partitions = [TopicPartition(topic, number) for number in range(2)]
        self.assets = GroupAssets.of(topic)
        self.kafka = KafkaConsumerResource(
            bootstrap_servers=kafka_broker.bootstrap_servers,
            group_id=topic,
            topics=[topic],
            **QUICK,
        )
        # Members see all of these records at once.
        self.producer = Producer({**kafka_broker.client_config(), "linger.ms": 1_000})
        self.values: list[tuple[int, int]] = []
        self.deleted: set[str] = set()
        self.fails = False

        @dg.asset
        def orders(kafka_batch: KafkaBatch) -> dg.MaterializeResult:  # type: ignore[type-arg]
            self.prune()
            if self.fails:
                os.kill(os.getpid(), signal.SIGTERM)
                msg = "the batch fails, and its claim stays"
                raise dg.Failure(msg)
            for record in kafka_batch.messages():
                self.values.append((record.partition() or 0, record.offset() or 0))
            os.kill(os.getpid(), signal.SIGTERM)
            return dg.MaterializeResult(metadata=kafka_batch.metadata())

        self.job = build_kafka_stream_defs(
            kafka=self.kafka, assets=[orders], name="stream"
        ).resolve_job_def("stream")

    def positions(self) -> KafkaPositions:
        with self.kafka.connect() as consumer:
            return KafkaPositions(
                consumer.committed(self.partitions), consumer.beginning_offsets(self.partitions)
            )

    def prune(self) -> None:
        """Delete everything that may be deleted, as if all runs were old."""
        of_group = Pruning(self.instance, self.assets, self.topic)
        plan = of_group.plan(self.positions, days=-1.0)
        self.deleted |= {run.run_id for run in of_group.delete(plan)}

    def run(self, *, fails: bool = False) -> str:
        """Produce records, and let a run process them, or fail on them."""
        for number in range(RECORDS):
            self.producer.produce(self.topic, b"x", partition=number % 2)
        assert self.producer.flush(120) == 0
        self.fails = fails
        tags = {STREAM_TAG: "shop:stream", SLOT_TAG: "0"}
        done = self.job.execute_in_process(instance=self.instance, tags=tags, raise_on_error=False)
        return done.run_id


def test_pruning_beside_a_live_group_loses_and_repeats_nothing(
    instance: dg.DagsterInstance, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    shop = Shop(instance, kafka_broker, kafka_topic(2, prefix="prune"))
    runs = [shop.run(), shop.run(), shop.run(fails=True)]
    shop.prune()
    assert runs[2] not in shop.deleted, "Kafka has its claims"
    runs += [shop.run(), shop.run()]
    shop.prune()
    left = {run.run_id for run in instance.get_runs(dg.RunsFilter(tags={GROUP_TAG: shop.topic}))}
    assert left == set(runs) - shop.deleted
    assert {runs[0], runs[1]} <= shop.deleted
    assert runs[-1] in left
    stored = shop.positions().stored
    with shop.kafka.connect() as consumer:
        bounds = read_bounds(consumer, shop.partitions)
    for partition in shop.partitions:
        committed = stored[partition]
        assert committed is not None
        offsets = [offset for number, offset in shop.values if number == partition.partition]
        assert offsets == list(range(committed.offset))
        past = sorted(one.range for one in processed(instance, shop.assets.offsets, partition))
        assert past[0].start == 0
        assert past[-1].until == committed.offset
        assert all(one.until == following.start for one, following in pairwise(past))
        lookup = OffsetLookup(instance, shop.assets, partition)
        for offset in range(committed.offset):
            facts = lookup.facts(offset, committed, bounds[partition])
            assert facts.committed is not None
            assert facts.committed.run_id in runs
            assert facts.has_run == (facts.committed.run_id in left)
            assert "committed by batch" in explain_offset(facts)[0]
