"""Scenarios that only a broker and its client can play: long holds, members that never poll, and many partitions."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from dagster_rebalance.consumer.events import PartitionsLost
from dagster_rebalance.consumer.rebalance_aware import RebalanceAwareConsumer
from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from tests.consumer.contract.stages import Actor, KafkaStage, pass_time, play
from tests.consumer.eviction import evict

if TYPE_CHECKING:
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory
    from tests.consumer.readers import Readers

pytestmark = pytest.mark.broker

SESSION_S = 1.5
PARTITIONS = 400


def test_a_hold_outlasts_the_session_timeout(kafka_broker: KafkaCluster, kafka_topic: TopicFactory) -> None:
    """Heartbeats keep the membership, which the client sends while it holds; only the poll interval ends a hold."""
    stage = KafkaStage(kafka_broker.bootstrap_servers, kafka_topic(4), "classic")
    stage.config["session.timeout.ms"] = f"{SESSION_S * 1000:.0f}"
    blue = Actor(stage).subscribe()
    play(lambda: len(blue.owns) == 4, blue, what="the first member to own everything")
    green = Actor(stage).subscribe()
    play(lambda: blue.member.held, blue, green, what="a revoke request")
    held, ends_at = blue.member.held, time.monotonic() + 2 * SESSION_S
    play(lambda: time.monotonic() > ends_at, blue, green, what="two session time-outs to pass")
    assert blue.member.held == held
    assert blue.member.commit(dict.fromkeys(held, OffsetAndMetadata(1))).committed == held
    blue.member.release()
    play(lambda: green.owns == held, blue, green, what="the handover")
    assert not blue.all_told(PartitionsLost)
    blue.member.close(5.0)
    green.member.close(5.0)


def test_closing_does_not_wait_for_a_member_that_never_polls(kafka_broker: KafkaCluster, kafka_topic: TopicFactory) -> None:
    """It keeps the whole group in a rebalance, which must not keep anybody from leaving."""
    stage = KafkaStage(kafka_broker.bootstrap_servers, kafka_topic(4), "classic")
    blue = Actor(stage).subscribe()
    play(lambda: len(blue.owns) == 4, blue, what="the first member to own everything")
    silent = Consumer({**stage.config, "partition.assignment.strategy": "cooperative-sticky"})
    silent.subscribe([stage.topic])
    play(lambda: blue.member.held, blue, what="a revoke request for the member that never polls")
    begun = time.monotonic()
    blue.member.close(5.0)
    assert time.monotonic() - begun < 3.0
    silent.close()


def test_of_hundreds_of_partitions_none_is_dead_after_pauses_in_quick_succession(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    """Assigned, paused, resumed, paused and resumed within a moment: one that stays silent is a stall that nobody sees."""
    topic = kafka_topic(PARTITIONS)
    producer = Producer({"bootstrap.servers": kafka_broker.bootstrap_servers, "linger.ms": 5})
    for number in range(PARTITIONS):
        producer.produce(topic, b"record", partition=number)
    assert producer.flush(20) == 0
    consumer = RebalanceAwareConsumer(
        {
            "bootstrap.servers": kafka_broker.bootstrap_servers,
            "group.id": unique_name("group"),
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
        }
    )
    heard: list[int] = []

    def poll() -> int:
        heard.extend(message.partition() or 0 for message in consumer.poll(0.1))
        return len(heard)

    consumer.subscribe([topic])
    wait_until(lambda: poll() >= 0 and len(consumer.assignment()) == PARTITIONS, timeout_s=20, what="the assignment", interval_s=0)
    for _ in range(2):
        consumer.pause(consumer.assignment())
        poll()
        consumer.resume(consumer.assignment())
    wait_until(lambda: poll() == PARTITIONS, timeout_s=20, what="a record of each partition", interval_s=0)
    assert sorted(heard) == list(range(PARTITIONS))
    consumer.close()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_hold_outlives_a_topic_that_is_deleted_and_one_that_begins_to_match(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory, protocol: str
) -> None:
    """Both change what the group is made of; afterwards every partition that exists has one owner."""
    prefix = unique_name("family")
    kept, deleted = kafka_topic(4, prefix=f"{prefix}-kept"), kafka_topic(2, prefix=f"{prefix}-deleted")
    stage = KafkaStage(kafka_broker.bootstrap_servers, kept, protocol)
    stage.discovery_interval_s = 1.0
    blue, green = Actor(stage), Actor(stage)
    blue.member.subscribe(re.compile(f"{prefix}-.*"))
    play(lambda: len(blue.owns) == 6, blue, what="the first member to own both topics")
    green.member.subscribe(re.compile(f"{prefix}-.*"))
    play(lambda: blue.member.held, blue, green, what="a revoke request")
    held = blue.member.held
    admin = AdminClient({"bootstrap.servers": kafka_broker.bootstrap_servers})
    admin.delete_topics([deleted])[deleted].result(10)
    begun = kafka_topic(2, prefix=f"{prefix}-new")
    pass_time(blue, green, polls=20)
    assert blue.member.held == held
    remaining = [tp for tp in held if tp.topic == kept]
    assert blue.member.commit(dict.fromkeys(remaining, OffsetAndMetadata(1))).failed == {}
    wanted = sorted([TopicPartition(kept, number) for number in range(4)] + [TopicPartition(begun, number) for number in range(2)])
    blue.member.release()

    def shared() -> bool:
        for actor in (blue, green):
            if actor.member.held:
                actor.member.release()
        return sorted([*blue.owns, *green.owns]) == wanted

    play(shared, blue, green, what="every partition that exists to have one owner")
    assert not blue.all_told(PartitionsLost)
    blue.member.close(5.0)
    green.member.close(5.0)


@pytest.mark.parametrize("group", ["consumer", "classic"], indirect=True)
def test_records_fetched_ahead_are_not_returned_once_their_partitions_are_lost(group: Readers, kafka_broker: KafkaCluster) -> None:
    """They are somebody else's; a worker that got one would do it a second time."""
    group.produce(500)
    blue = group.reader()
    protocol = "consumer" if group.protocol == "consumer" else "classic"

    def lost() -> bool:
        records = blue.consumer.poll(0.1, max_records=1)
        gone = blue.consumer.get_lost_partitions()
        if gone:
            assert records == []
        return bool(gone)

    wait_until(lambda: len(blue.consumer.poll(0.1, max_records=1)) == 1, timeout_s=12, what="a first record", interval_s=0)
    assert blue.consumer.assignment()
    evict(kafka_broker.bootstrap_servers, group.config["group.id"], blue.consumer.member_id, protocol)
    wait_until(lost, timeout_s=12, what="the loss", interval_s=0)
    late = blue.consumer.poll(0, max_records=500)
    assert not late or blue.consumer.assignment(), "about 2,000 were buffered"
