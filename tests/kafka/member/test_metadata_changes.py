"""Partitions are added while a revoke is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.events import PartitionsLost
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from tests.kafka.contract.stages import Actor, KafkaStage, pass_time, play

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker


class Scene:
    """Two members of a group; the first holds two of four partitions."""

    def __init__(self, kafka: KafkaCluster, topic: str, protocol: str) -> None:
        self.kafka = kafka
        self.stage = KafkaStage(kafka.bootstrap_servers, topic, protocol)
        self.stage.discovery_interval_s = 1.0
        self.blue = Actor(self.stage).subscribe()
        play(lambda: len(self.blue.owns) == 4, self.blue, what="the first member to own everything")
        self.green = Actor(self.stage).subscribe()
        play(
            lambda: self.blue.member.held,
            self.blue,
            self.green,
            what="a revoke request to the first member",
        )

    def add_two_partitions(self) -> frozenset[TopicPartition]:
        self.kafka.add_partitions(self.stage.topic, 6)
        return frozenset(TopicPartition(self.stage.topic, number) for number in (4, 5))

    def owned(self) -> list[TopicPartition]:
        return sorted([*self.blue.owns, *self.green.owns])

    def everything(self) -> list[TopicPartition]:
        return [TopicPartition(self.stage.topic, number) for number in range(6)]

    def close(self) -> None:
        self.blue.member.close(5.0)
        self.green.member.close(5.0)


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> Iterator[Scene]:
    made = Scene(kafka_broker, kafka_topic(4), request.param)
    yield made
    made.close()


@pytest.mark.parametrize("scene", ["classic"], indirect=True)
def test_classic_hold_survives_new_partitions_until_its_release(scene: Scene) -> None:
    blue, green = scene.blue, scene.green
    held = blue.member.held
    new = scene.add_two_partitions()
    pass_time(blue, green, polls=30)
    assert blue.member.held == held
    assert not new & (blue.owns | green.owns)
    assert blue.member.commit(dict.fromkeys(held, OffsetAndMetadata(1))).committed == held
    blue.member.release()

    def shared() -> bool:
        for actor in (blue, green):
            if actor.member.held:
                actor.member.release()
        return scene.owned() == scene.everything()

    play(shared, blue, green, what="the new partitions to be owned")
    assert not blue.partitions_of(PartitionsLost)
    assert not green.partitions_of(PartitionsLost)


@pytest.mark.parametrize("scene", ["consumer"], indirect=True)
def test_consumer_protocol_assigns_new_partitions_during_a_hold(scene: Scene) -> None:
    blue, green = scene.blue, scene.green
    held = blue.member.held
    new = scene.add_two_partitions()
    play(lambda: new & green.owns, blue, green, what="a new partition for the member that waits")
    assert blue.member.held == held
    blue.member.release()

    def shared() -> bool:
        for actor in (blue, green):
            if actor.member.held:
                actor.member.release()
        return scene.owned() == scene.everything()

    play(shared, blue, green, what="every partition to have one owner")
    assert not blue.partitions_of(PartitionsLost)
