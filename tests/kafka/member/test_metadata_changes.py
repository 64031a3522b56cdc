"""Partitions are added while a revoke is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.events import PartitionsLost
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from tests.kafka.contract.stages import Actor, KafkaStage, pass_time, play, share

if TYPE_CHECKING:
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker


@pytest.fixture
def stage(
    request: pytest.FixtureRequest, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> KafkaStage:
    made = KafkaStage(
        kafka_broker.bootstrap_servers, kafka_topic(4), request.param, cluster=kafka_broker
    )
    made.discovery_interval_s = 1.0
    return made


def add_two_partitions(kafka: KafkaCluster, topic: str) -> frozenset[TopicPartition]:
    kafka.add_partitions(topic, 6)
    return frozenset(TopicPartition(topic, number) for number in (4, 5))


@pytest.mark.parametrize("stage", ["classic"], indirect=True)
def test_classic_hold_survives_new_partitions_until_its_release(
    kafka_broker: KafkaCluster, blue: Actor, green: Actor
) -> None:
    held = blue.member.held
    new = add_two_partitions(kafka_broker, blue.stage.topic)
    pass_time(blue, green, polls=30)
    assert blue.member.held == held
    assert not new & (blue.owns | green.owns)
    assert blue.member.commit(dict.fromkeys(held, OffsetAndMetadata(1))).committed == held
    blue.member.release()
    share(blue, green, partitions=6, what="the new partitions to be owned")
    assert not blue.partitions_of(PartitionsLost)
    assert not green.partitions_of(PartitionsLost)


@pytest.mark.parametrize("stage", ["consumer"], indirect=True)
def test_consumer_protocol_assigns_new_partitions_during_a_hold(
    kafka_broker: KafkaCluster, blue: Actor, green: Actor
) -> None:
    held = blue.member.held
    new = add_two_partitions(kafka_broker, blue.stage.topic)
    play(lambda: new & green.owns, blue, green, what="a new partition for the member that waits")
    assert blue.member.held == held
    blue.member.release()
    share(blue, green, partitions=6, what="every partition to have one owner")
    assert not blue.partitions_of(PartitionsLost)
