"""Commits on a real broker: a topic that is deleted in a hold, and requests above 1 MB."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.offset_tracker import OffsetTracker
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Message

    from dagster_rebalance.core.model.errors import BrokerError
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker

PATIENCE_S = 120.0


class Loop:
    """The loop of the docstring of `OffsetTracker`."""

    def __init__(self, consumer: RebalanceAwareConsumer) -> None:
        self.consumer = consumer
        self.tracker = OffsetTracker()
        self.works_at_once = True
        self.open: list[Message] = []
        self.lost: set[TopicPartition] = set()
        self.failed: dict[TopicPartition, BrokerError] = {}
        self.due: frozenset[TopicPartition] = frozenset()

    def turn(self) -> None:
        records = self.consumer.poll(0.1)
        self.lost |= self.consumer.get_lost_partitions()
        gone = self.tracker.partitions - self.consumer.assignment()
        self.tracker.forget(self.consumer.get_lost_partitions() | gone)
        self.tracker.track(records)
        self.open += records
        if self.works_at_once:
            self.finish()
        self.failed = self.tracker.commit(self.consumer)
        self.due = self.consumer.get_to_be_revoked_partitions()
        self.consumer.delay_revoke(self.tracker.unfinished(self.due))

    def finish(self) -> None:
        for record in self.open:
            self.tracker.done_record(record)
        self.open = []


def fill(kafka: KafkaCluster, *topics: str) -> None:
    producer = Producer(kafka.client_config())
    for topic in topics:
        for number in range(40):
            producer.produce(topic, f"{number}".encode(), partition=number % 4)
    assert producer.flush(120) == 0


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_hold_of_a_deleted_topic_is_released(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory, protocol: str
) -> None:
    kept, gone = kafka_topic(4), f"a-{unique_name('gone')}"
    kafka_broker.create_topic(gone, 4)
    fill(kafka_broker, kept, gone)
    config = {
        **kafka_broker.client_config(),
        "group.id": unique_name("group"),
        "group.protocol": protocol,
        "auto.offset.reset": "earliest",
    }
    with (
        closing(RebalanceAwareConsumer(config, probe_interval_s=0.3)) as first,
        closing(RebalanceAwareConsumer(config, probe_interval_s=0.3)) as second,
    ):
        loop, other = Loop(first), Loop(second)
        first.subscribe([kept, gone])
        mine = {TopicPartition(kept, number) for number in range(4)}

        def play(until: Callable[[], bool], what: str, *loops: Loop) -> None:
            def step() -> bool:
                for one in loops:
                    one.turn()
                return until()

            wait_until(step, timeout_s=PATIENCE_S, what=what)

        play(lambda: len(loop.tracker.partitions) == 8, "the records of both topics", loop)
        loop.works_at_once = False
        fill(kafka_broker, kept, gone)
        play(lambda: len(loop.open) == 80, "more records", loop)
        second.subscribe([gone])
        play(lambda: bool(loop.due), "the hold", loop, other)
        kafka_broker.delete_topic(gone)
        loop.finish()
        play(lambda: not loop.due, "the end of the hold", loop)
        assert not loop.lost & mine
        assert first.assignment() >= mine
        assert not loop.tracker.unfinished(mine)
        stored = first.committed(mine)
        assert {tp: offset and offset.offset for tp, offset in stored.items()} == dict.fromkeys(
            mine, 20
        )


def test_commit_above_the_limit_of_the_offsets_topic_is_stored(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(300)
    config = {**kafka_broker.client_config(), "group.id": unique_name("group")}
    with closing(RebalanceAwareConsumer(config, fetch=False)) as consumer:
        consumer.subscribe([topic])
        wait_until(
            lambda: consumer.poll(0.1) or len(consumer.assignment()) == 300,
            timeout_s=PATIENCE_S,
            what="the assignment",
        )
        offsets = dict.fromkeys(consumer.assignment(), OffsetAndMetadata(7, "x" * 4_000))
        result = consumer.commit_offsets(offsets)
        assert not result.failed
        stored = consumer.committed(offsets)
        assert {found and (found.offset, len(found.metadata)) for found in stored.values()} == {
            (7, 4_000)
        }
